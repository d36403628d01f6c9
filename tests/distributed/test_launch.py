"""The lines of a user's script under Paddle's own launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("kind", ["exact", "sharded"])
def test_the_trainer_with_lora_and_accumulation_trains_as_on_one_process(found, tmp_path, kind):
    if kind not in found[0]:
        pytest.skip("PaddleNLP comes with the extra [ernie]")
    import launched

    alone = launched.exact_trainer(tmp_path, 1)
    together = [rank[kind] for rank in found]
    assert together[0]["values"] == together[1]["values"]
    # Sums in another order, and Adam divides by roots of small numbers.
    np.testing.assert_allclose(together[0]["values"], alone["values"], rtol=0, atol=2e-4)
    assert (together[0]["batch_size"], together[0]["steps"]) == (alone["batch_size"], alone["steps"]) == (48, 4)
    if kind == "sharded":
        assert together[0]["saved"] == 4 * 4  # moments and powers of four trained tensors, from both ranks
    held = [rank["held"] for rank in together]
    assert held == [alone["held"]] * 2 if kind == "exact" else sum(held) == alone["held"] and min(held) > 0


def test_the_trainer_runs_on_two_processes(found):
    if "trainer" not in found[0]:
        pytest.skip("PaddleNLP comes with the extra [ernie]")
    trainers = [rank["trainer"] for rank in found]
    assert trainers[0] == trainers[1]
    assert (trainers[0]["batch_size"], trainers[0]["steps"]) == (12, 5)
    expected = compute_epsilon(noise_multiplier=1.0, sample_rate=12 / 50, steps=5, delta=1e-5, accountant="rdp")
    assert trainers[0]["epsilon"] == pytest.approx(expected, rel=1e-9)
