"""An Opacus program in Paddle: engine, validator, and a loop that does not know about privacy.

python examples/opacus_style.py
"""

from __future__ import annotations

import argparse

import numpy as np
import paddle
from paddle import nn
from paddle.io import DataLoader, TensorDataset

from paddle_privacy import ModuleValidator, PrivacyEngine


def digits(rows: int, seed: int) -> TensorDataset:
    """Images of 8 x 8 with a bright bar in one of four places."""
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, 4, rows)
    images = rng.randn(rows, 1, 8, 8).astype("float32") * 0.5
    for image, label in zip(images, labels):
        image[0, 2 * label : 2 * label + 2] += 1.0
    return TensorDataset([images, labels.astype("int64")])


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--epsilon", type=float, default=3.0)
    options = parser.parse_args(arguments)

    paddle.seed(1)
    model = nn.Sequential(
        nn.Conv2D(1, 16, 3, padding=1),
        nn.BatchNorm2D(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 4),
    )
    model = ModuleValidator.fix(model)  # BatchNorm2D becomes GroupNorm
    optimizer = paddle.optimizer.Adam(learning_rate=2e-3, parameters=model.parameters())
    loader = DataLoader(digits(options.rows, seed=0), batch_size=100, shuffle=True)

    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=options.epsilon,
        target_delta=1e-5,
        epochs=options.epochs,
        max_grad_norm=1.0,
        max_physical_batch_size=64,
    )
    for epoch in range(options.epochs):
        model.train()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
        print(f"epoch {epoch + 1}: loss {float(loss):.3f}, ε={engine.get_epsilon(delta=1e-5):.2f}")

    model.eval()
    images, labels = (paddle.to_tensor(t) for t in digits(500, seed=1).tensors)
    accuracy = float((model(images).argmax(-1) == labels).astype("float32").mean())
    print(f"accuracy {accuracy:.3f} at ε={engine.get_epsilon(delta=1e-5):.2f}, δ=1e-05 (add or remove one row)")
    return {"accuracy": accuracy, "epsilon": engine.get_epsilon(delta=1e-5), "optimizer": optimizer}


if __name__ == "__main__":
    main()
