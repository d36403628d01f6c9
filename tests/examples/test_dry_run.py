"""--dry-run: figures against formulas and the accountant, and nothing written or learnt of the rows."""

import math
import re
import shlex

import pytest

from paddle_privacy.accounting import compute_epsilon, get_noise_multiplier
from paddle_privacy.cli import main

FLAGS = ("--batch-size", "50", "--epochs", "2", "--max-length", "16")
ROWS, STEPS, RATE = 299, 12, 50 / 299


@pytest.fixture
def dry(run):
    def start(*flags):
        code, folder, shown = run("--dry-run", *FLAGS, *flags)
        assert code == 0, shown
        assert not folder.exists()
        return shown

    return start


def cell(shown, name):
    return re.search(rf"^  {re.escape(name)} +(.+)$", shown, re.MULTILINE)[1]


def test_figures_follow_from_the_number_of_rows(dry):
    shown = dry()
    sigma = get_noise_multiplier(target_epsilon=3.0, target_delta=1e-5, sample_rate=RATE, steps=STEPS)
    trained = int(cell(shown, "trained parameters").replace(",", ""))
    assert cell(shown, "σ (noise multiplier)") == f"{sigma:.4f}"
    assert cell(shown, "steps") == f"{STEPS} in 2 epochs"
    assert cell(shown, "B (expected batch)").startswith(f"50 of {ROWS} rows")
    assert cell(shown, "noise in a coordinate of the mean gradient") == f"σC/B = {sigma * 5 / 50:.3g}"
    assert cell(shown, "signal to noise in one coordinate, B/σ") == f"{50 / sigma:.4g}"
    whole = 50 / (sigma * math.sqrt(trained))
    assert cell(shown, "signal to noise of the whole gradient, B/(σ√d)") == f"{whole:.4g}"
    expected = [
        f"{compute_epsilon(noise_multiplier=sigma, sample_rate=RATE, steps=steps, delta=1e-5):.3f} after {steps}"
        for steps in (1, 3, 6, 9, 12)
    ]
    assert cell(shown, "ε at δ=1e-05 after steps") == "; ".join(expected)
    assert re.fullmatch(r"\d+ MiB", cell(shown, "expected peak memory (host)"))


def test_the_plan_command_runs_as_printed_and_agrees(dry, capsys):
    shown = dry()
    program, *arguments = shlex.split(shown.rstrip().splitlines()[-1])
    assert program == "paddle-privacy"
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    planned = capsys.readouterr().out
    sigma = float(cell(shown, "σ (noise multiplier)"))
    own = [line.split() for line in planned.splitlines() if line.split()[:1] == ["50"]]
    # The plan rounds σ up where the table rounds it to nearest.
    assert any(int(steps) == STEPS and abs(float(s) - sigma) <= 1.01e-4 for _, _, steps, s, *_ in own), own


def test_no_training_text_is_looked_at(dry, mini, monkeypatch):
    import clip_norm
    import ernie

    texts = []
    encode = ernie.encode

    def recording(tokenizer, given, *rest):
        texts.extend(given)
        return encode(tokenizer, given, *rest)

    monkeypatch.setattr(ernie, "encode", recording)
    monkeypatch.setattr(clip_norm, "gradient_norms", None)
    shown = dry("--clip-norm", "auto")
    assert "the 299 training rows were counted and the 2 labels listed" in shown
    assert cell(shown, "C (clip norm)") == "read off the rows when the run starts"
    assert len(texts) > 20
    assert not set(texts) & {text for rows in mini.values() for text, _ in rows}


def test_what_the_run_would_refuse_is_refused(run):
    code, _, shown = run("--dry-run", "--batch-size", "5000")
    assert code == 2
    assert "batch_size" in shown


@pytest.mark.parametrize("flags", [("--non-private",), ("--strategy", "head", "--physical-batch-size", "20")])
def test_other_kinds_of_run(dry, flags):
    shown = dry(*flags)
    assert cell(shown, "one step").endswith(f"pieces of {20 if 'head' in flags else 50} rows of 16 tokens")
    assert ("σ" in shown) == ("--non-private" not in flags)


def test_times_add_up():
    from arguments import parse_arguments
    from dry_run import time_rows
    from timing import Timing

    args = parse_arguments(["--batch-size", "100", "--max-length", "16"])
    timing = Timing(encoding=0.5, evaluation=0.25, gradient=0.01, update=2.0, batch=100)
    rows = dict(time_rows(args, timing, steps=10, held=20, evaluated=8))
    assert rows["one step"].startswith("3 s;")
    assert rows["expected time"].startswith("42 s")
    assert rows["  of which"] == "encoding 10 s, training 30 s, evaluation 2 s"
