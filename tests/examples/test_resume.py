"""Runs that end early and go on: same number of steps, same ε, no step forgotten, no noise or weights made up."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import RECIPE, lines, read

from paddle_privacy.accounting import compute_epsilon
from paddle_privacy.verify.chain import read_ledger

PRIVATE = ("--batch-size", "50", "--epochs", "2", "--physical-batch-size", "32")
STEPS = 12


@pytest.fixture
def interrupted(run, monkeypatch):
    """Starts a run, and presses Ctrl-C when its first epoch is over: it ends after one step of the second."""
    import loop

    def start(*flags, **where):
        evaluate, calls = loop.evaluate, []

        def interrupting(*args):
            if not calls:
                os.kill(os.getpid(), signal.SIGINT)
            calls.append(1)
            return evaluate(*args)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "evaluate", interrupting)
            return run(*flags, **where)

    return start


@pytest.mark.parametrize("strategy", [(), ("--strategy", "head"), ("--strategy", "lora")])
def test_an_interrupted_run_ends_as_a_straight_one(run, interrupted, begun, strategy, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    code, folder, shown = interrupted(*PRIVATE, *strategy)
    assert code == 0
    assert signal.getsignal(signal.SIGINT) is handler
    assert f"--resume {folder}" in shown
    summary = read(folder, "summary.json")
    assert (summary["ended"], summary["steps"]) == ("interrupted", 7)
    assert 0 < summary["epsilon"] < 3
    assert (folder / "model" / "config.json").is_file()
    config = read(folder, "config.json")
    code, _, shown = run("--resume", folder)
    assert code == 0
    assert "resumed: 7 steps were taken" in shown

    # It starts from the weights that the interrupted run ended with, not from the model's own.
    first, second = begun
    assert second["steps"] == 7
    assert second["rate"] == pytest.approx(first["rate"] * (1 - 7 / STEPS))
    for left, found in zip(first["after"], second["weights"]):
        np.testing.assert_array_equal(left, found)

    straight = read(run(*PRIVATE, *strategy, output=tmp_path / "straight")[1], "summary.json")
    summary = read(folder, "summary.json")
    for name in ("ended", "steps", "epsilon", "noise_multiplier", "clip_norm", "delta"):
        assert summary[name] == straight[name], name
    assert read(folder, "config.json") == config
    assert [(m["epoch"], m["step"]) for m in lines(folder / "metrics.jsonl")] == [(1, 6), (2, 7), (2, 12)]

    ledger = read_ledger(folder / "ledger.jsonl")
    assert [r.steps for r in ledger.runs] == [7, 5]
    spent = [epsilon for r in ledger.runs for epsilon in r.epsilon]
    assert spent == sorted(spent)
    assert spent[-1] == summary["epsilon"]
    assert not (folder / "checkpoint").exists()


def test_the_moving_average_goes_on(run, interrupted, begun):
    """The weights of an interrupted run with --ema are the average, but training goes on from its own."""
    _, folder, _ = interrupted("--non-private", "--epochs", "2", "--batch-size", "50", "--ema", "0.9")
    code, _, _ = run("--resume", folder)
    assert code == 0
    first, second = begun
    assert second["averaged"] == 7
    for ended, average in zip(first["after"], second["averages"]):
        np.testing.assert_array_equal(ended, average)
    assert any((average != own).any() for average, own in zip(second["averages"], second["weights"]))
    assert read(folder, "summary.json")["steps"] == STEPS


def test_kill_9_loses_weights_and_no_epsilon(run, small_folder, tmp_path):
    """Killed after step 9; the checkpoint is of step 6. The three lost steps count, so three are left."""
    folder = tmp_path / "killed"
    code = (
        "import os, signal, sys, run_folder, train\n"
        "def step(self, taken=[]):\n"
        "    taken.append(1)\n"
        "    if len(taken) == 9: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run_folder.Progress.step = step\n"
        "train.main(sys.argv[1:])\n"
    )
    flags = ["--data", str(small_folder), "--output", str(folder), "--accountant", "rdp", *PRIVATE]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(RECIPE), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (folder / "summary.json").exists()
    with (folder / "metrics.jsonl").open("a") as torn:
        torn.write('{"epoch": 2, "st')

    code, _, shown = run("--resume", folder, "--physical-batch-size", "64")
    assert code == 0
    assert "resumed: 9 steps were taken; of 3 of them the weights are lost, and ε still counts them" in shown
    summary = read(folder, "summary.json")
    assert (summary["ended"], summary["steps"]) == ("completed", STEPS)
    assert summary["epsilon"] == pytest.approx(
        compute_epsilon(noise_multiplier=summary["noise_multiplier"], sample_rate=50 / 299, steps=STEPS, delta=1e-5),
        rel=1e-9,
    )
    assert [r.steps for r in read_ledger(folder / "ledger.jsonl").runs] == [9, 3]
    assert [(m["epoch"], m["step"]) for m in lines(folder / "metrics.jsonl")] == [(1, 6), (2, 12)]


def test_ended_at_once_in_the_first_epoch_it_starts_from_the_original_weights(run, begun, monkeypatch):
    """What a second Ctrl-C does: three steps are in the ledger, and the checkpoint is that of the beginning."""
    import run_folder

    taken = []

    def step(self):
        taken.append(1)
        if len(taken) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.Progress, "step", step)
        code, folder, shown = run(*PRIVATE)
    assert code == 130
    assert f"go on with --resume {folder}" in shown
    code, _, shown = run("--resume", folder)
    assert code == 0
    assert "resumed: 3 steps were taken; of 3 of them the weights are lost" in shown
    first, second = begun
    assert second["steps"] == 3
    for left, found in zip(first["weights"], second["weights"]):
        np.testing.assert_array_equal(left, found)
    assert read(folder, "summary.json")["steps"] == STEPS
    assert [r.steps for r in read_ledger(folder / "ledger.jsonl").runs] == [3, 9]


def test_flags_that_are_not_the_runs_are_refused(interrupted, run, capsys):
    _, folder, _ = interrupted(*PRIVATE)
    for flags, message in (
        (("--epsilon", "8"), "--epsilon is 3.0 there, not 8.0"),
        (("--clip-norm", "1"), "--clip-norm is 5.0 there, not 1.0"),
        (("--epochs", "3"), "--epochs is 2 there, not 3"),
        (("--batch-size", "60"), "--batch-size is 50 there, not 60"),
        (("--data", "mini"), "--data is"),
        (("--non-private",), "--non-private is False there, not True"),
        (("--accountant", "pld"), "--accountant is rdp there, not pld"),
        (("--output", "elsewhere"), "--output is"),
        (("--dry-run",), "leave --resume out"),
    ):
        with pytest.raises(SystemExit):
            run("--resume", folder, *flags)
        assert message in capsys.readouterr().err
    assert read_ledger(folder / "ledger.jsonl").steps == 7


def test_what_cannot_go_on_says_why(run, interrupted, small_folder, capsys, tmp_path):
    with pytest.raises(SystemExit):
        run("--resume", tmp_path / "nowhere")
    assert "no run began in it" in capsys.readouterr().err

    _, folder, _ = interrupted(*PRIVATE)
    rows = (small_folder / "train.tsv").read_text(encoding="utf-8")
    (small_folder / "train.tsv").write_text(rows + "1\t新来的\n", encoding="utf-8")
    code, _, shown = run("--resume", folder)
    assert code == 2
    assert "began with 299 training rows, now there are 300" in shown
    (small_folder / "train.tsv").write_text(rows, encoding="utf-8")

    weights = next((folder / "checkpoint").glob("model-*"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    code, _, shown = run("--resume", folder)
    assert code == 2
    assert "damaged" in shown
    weights.write_bytes(whole)

    summary = read(folder, "summary.json")
    (folder / "summary.json").write_text(json.dumps({**summary, "ended": "completed", "steps": 12}), encoding="utf-8")
    code, _, shown = run("--resume", folder)
    assert code == 2
    assert "has ended (completed after 12 steps)" in shown
