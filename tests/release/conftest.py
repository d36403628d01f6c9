"""Ledgers of small real runs."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_privacy import DPSGD, NoiseGenerator, PoissonBatchSampler


class Rows(paddle.io.Dataset):
    def __init__(self, count=200, width=6, classes=3):
        generator = np.random.default_rng(0)
        self.inputs = generator.normal(size=(count, width)).astype(np.float32)
        self.labels = generator.integers(0, classes, count)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.inputs[row], self.labels[row]


def build_model():
    paddle.seed(3)
    return paddle.nn.Sequential(paddle.nn.Linear(6, 5), paddle.nn.ReLU(), paddle.nn.Linear(5, 3))


def train(path, epochs=2, seeded=False, **arguments):
    """A private run of ``10 * epochs`` steps; returns (model, optimizer) with the ledger closed."""
    rows, model = Rows(), build_model()
    loader = paddle.io.DataLoader(rows, batch_sampler=PoissonBatchSampler(rows, batch_size=20))
    noise = {"generator": NoiseGenerator.seeded(5), "secure": False} if seeded else {}
    settings = {"noise_multiplier": 1.0, "target_delta": 1e-4, "clip_norm": 1.0, **arguments}
    optimizer = DPSGD(
        parameters=model.parameters(),
        learning_rate=0.1,
        batch_size=20,
        data_loader=loader,
        ledger=str(path),
        **noise,
        **settings,
    )
    for _ in range(epochs):
        for inputs, labels in loader:
            paddle.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.clear_grad()
    optimizer._ledger.close()
    return model, optimizer


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """(model, ledger path, ε at δ=1e-4) of one run."""
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl"
    model, optimizer = train(path)
    return model, path, optimizer.get_privacy_spent(1e-4).epsilon
