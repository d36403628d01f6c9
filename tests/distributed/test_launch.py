"""The lines of a user's script under Paddle's own launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_privacy.accounting import compute_epsilon


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node=2", "--backend", "gloo"]
    ended = subprocess.run(
        [*launcher, str(Path(__file__).with_name("launched.py")), str(folder)],
        env=surroundings,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    logs = "\n".join(log.read_text()[-3000:] for log in folder.glob("log/workerlog.*"))
    assert ended.returncode == 0, ended.stderr[-2000:] + logs
    return [json.loads((folder / f"launched{rank}.json").read_text()) for rank in range(2)]


def test_the_plain_loop_runs_unchanged_on_two_processes(found):
    loops = [rank["loop"] for rank in found]
    assert loops[0] == loops[1]
    expected = compute_epsilon(noise_multiplier=1.2, sample_rate=0.2, steps=10, delta=1e-5, accountant="rdp")
    assert loops[0]["epsilon"] == pytest.approx(expected, rel=1e-9)


def test_the_trainer_runs_on_two_processes(found):
    if "trainer" not in found[0]:
        pytest.skip("PaddleNLP comes with the extra [ernie]")
    trainers = [rank["trainer"] for rank in found]
    assert trainers[0] == trainers[1]
    assert (trainers[0]["batch_size"], trainers[0]["steps"]) == (12, 5)
    expected = compute_epsilon(noise_multiplier=1.0, sample_rate=12 / 50, steps=5, delta=1e-5, accountant="rdp")
    assert trainers[0]["epsilon"] == pytest.approx(expected, rel=1e-9)
