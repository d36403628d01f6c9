"""Trains in child processes that are killed with SIGKILL at random moments; run by test_checkpoint.py.

Every release is counted in a file of its own, when its noise is taken and before it is used, by a wrapper around the
noise generator: one byte, unbuffered, appended. Every resumed run writes what its account says beside that count.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import paddle
from paddle import nn
from paddle.io import DataLoader, TensorDataset

from paddle_privacy.checkpoint import MANIFEST
from paddle_privacy.engine import PrivacyEngine

warnings.simplefilter("ignore")


def make(folder: Path):
    rows = np.random.RandomState(0).randn(60, 4).astype("float32")
    model = nn.Sequential(nn.Linear(4, 3))
    schedule = paddle.optimizer.lr.ExponentialDecay(0.1, 0.99)
    optimizer = paddle.optimizer.Adam(schedule, parameters=model.parameters())
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset([rows]), batch_size=6, shuffle=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        ledger=folder / "ledger.jsonl",
    )
    return engine, model, optimizer, loader, schedule


def child(folder: Path) -> None:
    engine, model, optimizer, loader, schedule = make(folder)
    if (folder / "saved" / MANIFEST).exists():
        engine.load_checkpoint(path=folder / "saved", module=model)
    releases = os.open(folder / "releases", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    reserve = optimizer.noise.reserve

    def counted(*args, **kwargs):
        os.write(releases, b".")
        return reserve(*args, **kwargs)

    optimizer.noise.reserve = counted
    report(folder, optimizer)
    while True:
        for i, (x,) in enumerate(loader):
            (model(x) ** 2).mean().backward()
            optimizer.step()
            schedule.step()
            optimizer.clear_grad()
            if i % 4 == 3:
                engine.save_checkpoint(path=folder / "saved", module=model)


def report(folder: Path, optimizer) -> None:
    """What a resumed run believes to have spent, beside the releases made by then. Nothing is released in between."""
    releases = (folder / "releases").stat().st_size if (folder / "releases").exists() else 0
    counted = sum(count for _, count in optimizer.accountant.history)
    with open(folder / "reports", "a") as out:
        out.write(json.dumps({"counted": counted, "releases": releases}) + "\n")


def main(folder: Path, cycles: int, seed: int) -> None:
    moments = random.Random(seed)
    for _ in range(cycles):
        reports = folder / "reports"
        begun = reports.stat().st_size if reports.exists() else 0
        pid = os.fork()
        if pid == 0:
            child(folder)
        # The clock starts when the run does; one in five is killed while it still loads.
        early = moments.random() < 0.2
        while not early and (not reports.exists() or reports.stat().st_size == begun):
            time.sleep(0.002)
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the child ended by itself"
        time.sleep(moments.uniform(0.0, 0.25))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself"
    pid = os.fork()
    if pid == 0:
        engine, model, optimizer, _, _ = make(folder)
        if (folder / "saved" / MANIFEST).exists():
            engine.load_checkpoint(path=folder / "saved", module=model)
        report(folder, optimizer)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
