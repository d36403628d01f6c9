"""paddle.Model.fit, private, with ε in the progress bar.

python examples/paddle_model.py
"""

from __future__ import annotations

import argparse

import numpy as np
import paddle
from paddle import nn
from paddle.io import DataLoader, TensorDataset

from paddle_privacy import DPSGD, PoissonBatchSampler
from paddle_privacy.integrations.hapi import PrivacyCallback


def spirals(rows: int, seed: int) -> TensorDataset:
    """Points on two arms."""
    rng = np.random.RandomState(seed)
    labels = rng.randint(0, 2, rows)
    angle = rng.rand(rows) * 4
    points = np.stack([angle * np.cos(angle + np.pi * labels), angle * np.sin(angle + np.pi * labels)], 1)
    return TensorDataset([(points + rng.randn(rows, 2) * 0.15).astype("float32"), labels.astype("int64")])


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--verbose", type=int, default=2)
    parser.add_argument("--log-dir", default=None, help="write curves for VisualDL here")
    options = parser.parse_args(arguments)

    paddle.seed(1)
    rows = spirals(options.rows, seed=0)
    loader = DataLoader(rows, batch_sampler=PoissonBatchSampler(rows, batch_size=150))
    network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = DPSGD(
        learning_rate=2.0,
        parameters=network.parameters(),
        clip_norm=1.0,
        batch_size=150,
        data_loader=loader,
        epochs=options.epochs,
        target_epsilon=4.0,
        target_delta=1e-5,
    )
    callbacks: list = [PrivacyCallback(log_freq=10, verbose=options.verbose)]
    if options.log_dir:
        from paddle_privacy.integrations.visualdl import VisualDLCallback

        callbacks.append(VisualDLCallback(options.log_dir))

    model = paddle.Model(
        network,
        paddle.static.InputSpec([None, 2], "float32", "points"),
        paddle.static.InputSpec([None], "int64", "labels"),
    )
    model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    model.fit(loader, epochs=options.epochs, callbacks=callbacks, verbose=0)

    result = model.evaluate(spirals(500, seed=1), batch_size=500, verbose=0)
    epsilon, delta = optimizer.get_privacy_spent()
    print(f"accuracy {result['acc']:.3f} at ε={epsilon:.2f}, δ={delta:g} (add or remove one row)")
    return {"accuracy": result["acc"], "epsilon": epsilon, "optimizer": optimizer}


if __name__ == "__main__":
    main()
