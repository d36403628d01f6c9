"""Federated averaging over 1,000 simulated clients, private at the level of a client.

Each client holds a few rows of its own mixture of classes. A round draws clients at rate q, each trains a copy of the
model on its rows and sends the change of the weights; the server clips each change to C, adds them with noise and moves
the weights. ε is about a whole client, with all its rows and all the rounds it took part in.

    python examples/federated_simulation.py
"""

from __future__ import annotations

import argparse

import numpy as np
import paddle
from paddle import nn

from paddle_privacy.accounting import get_accountant
from paddle_privacy.federated import aggregate, draw_clients

FEATURES, CLASSES = 20, 4


def make_clients(number: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], tuple[np.ndarray, np.ndarray]]:
    """Rows of each client, in proportions of classes of its own, and a test set in equal proportions."""
    random = np.random.RandomState(0)
    centres = random.randn(CLASSES, FEATURES) * 0.7

    def rows(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (centres[labels] + random.randn(len(labels), FEATURES)).astype("float32"), labels.astype("int64")

    clients = [
        rows(random.choice(CLASSES, 5 + random.poisson(15), p=random.dirichlet([0.5] * CLASSES))) for _ in range(number)
    ]
    return clients, rows(random.randint(0, CLASSES, 2000))


def train_locally(model: nn.Layer, start: list[paddle.Tensor], rows: np.ndarray, labels: np.ndarray) -> list:
    """What one client sends: how three steps on its rows changed the weights. Nothing private happens here."""
    for parameter, value in zip(model.parameters(), start):
        parameter.set_value(value.clone())  # set_value shares memory, and `start` is every client's
    optimizer = paddle.optimizer.SGD(0.2, parameters=model.parameters())
    x, y = paddle.to_tensor(rows), paddle.to_tensor(labels)
    for _ in range(3):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.clear_grad()
    return [parameter - value for parameter, value in zip(model.parameters(), start)]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sample-rate", type=float, default=0.1)
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    parser.add_argument("--clip-norm", type=float, default=0.5)
    options = parser.parse_args(arguments)

    paddle.seed(0)
    clients, (test_rows, test_labels) = make_clients(options.clients)
    model = nn.Linear(FEATURES, CLASSES)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    accountant = get_accountant("rdp")
    for _ in range(options.rounds):
        chosen = draw_clients(options.clients, options.sample_rate)

        step = aggregate(
            (train_locally(model, weights, *clients[client]) for client in chosen),
            options.clip_norm,
            options.noise_multiplier,
            expected_clients=options.sample_rate * options.clients,
            like=weights,
            accountant=accountant,
            sample_rate=options.sample_rate,
        )
        weights = [value + change for value, change in zip(weights, step)]

    for parameter, value in zip(model.parameters(), weights):
        parameter.set_value(value)
    predicted = model(paddle.to_tensor(test_rows)).argmax(axis=1).numpy()
    accuracy, epsilon = float((predicted == test_labels).mean()), accountant.get_epsilon(1e-4)
    print(f"accuracy {accuracy:.3f} after {options.rounds} rounds; ε={epsilon:.2f} at δ=1e-4 for each client")
    return {"accuracy": accuracy, "epsilon": epsilon}


if __name__ == "__main__":
    main()
