"""The commands epsilon, noise and plan, as a user runs them."""

from __future__ import annotations

import json
import math

import pytest

from paddle_privacy.accounting import compute_epsilon
from paddle_privacy.cli import main

RUN = ["--dataset-size", "9600", "--batch-size", "256", "--epochs", "10", "--delta", "1e-5"]
RATE = 256 / 9600


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out = capsys.readouterr()
    return stop.value.code or 0, out.out, out.err


def test_epsilon_prints_three_accountants_with_their_assumptions(capsys):
    code, out, _ = run(capsys, "epsilon", *RUN, "--noise-multiplier", "1.1")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert "375 steps" in out and "one row" in out
    for name in ("rdp", "pld"):
        exact = compute_epsilon(noise_multiplier=1.1, sample_rate=RATE, steps=375, delta=1e-5, accountant=name)
        printed = float(lines[name].split()[1])
        assert exact <= printed <= exact + 1e-4
        assert "Poisson" in lines[name] and "add_or_remove_one" in lines[name]
    assert "no amplification" in lines["zcdp"] and "zero_out" in lines["zcdp"]
    assert float(lines["zcdp"].split()[1]) > 15


def test_epsilon_as_json_and_plot(capsys, tmp_path):
    path = tmp_path / "curve.png"
    code, out, _ = run(capsys, "epsilon", *RUN, "--noise-multiplier", "1.1", "--json", "--plot", str(path))
    facts = json.loads(out)
    assert code == 0 and facts["steps"] == 375 and facts["participations_if_shuffled"] == 10
    assert [row["accountant"] for row in facts["results"]] == ["rdp", "pld", "zcdp"]
    assert path.read_bytes().startswith(b"\x89PNG")
    _, out, _ = run(capsys, "epsilon", *RUN, "--noise-multiplier", "0", "--json")
    assert [row["epsilon"] for row in json.loads(out)["results"]] == [None] * 3
    _, grouped, _ = run(capsys, "epsilon", *RUN, "--noise-multiplier", "1.1", "--json", "--group-size", "2")
    for single, pair in zip(facts["results"], json.loads(grouped)["results"]):
        assert pair["epsilon"] > single["epsilon"]


def test_a_printed_sigma_keeps_the_target_when_typed_back(capsys):
    code, out, _ = run(capsys, "noise", "--target-epsilon", "3", *RUN)
    assert code == 0
    for line in out.splitlines()[2:]:
        name, sigma = line.split()[:2]
        if name in ("rdp", "pld"):
            spent = compute_epsilon(
                noise_multiplier=float(sigma), sample_rate=RATE, steps=375, delta=1e-5, accountant=name
            )
            assert 2.99 < spent <= 3.0
    _, out, _ = run(capsys, "noise", "--target-epsilon", "3", *RUN, "--json")
    assert all(row["epsilon"] <= 3 for row in json.loads(out)["results"])


def test_plan_compares_batch_sizes_and_epochs(capsys, tmp_path):
    grid = ["--batch-sizes", "128,512", "--epochs", "1,10"]
    path = tmp_path / "plan.png"
    arguments = ["plan", "--target-epsilon", "3", "--dataset-size", "9600", "--delta", "1e-5", *grid]
    code, out, _ = run(capsys, *arguments, "--json", "--plot", str(path))
    rows = json.loads(out)["rows"]
    assert code == 0 and [(row["batch_size"], row["epochs"]) for row in rows] == [
        (128, 1),
        (128, 10),
        (512, 1),
        (512, 10),
    ]
    for row in rows:
        sigma, steps = row["noise_multiplier"], row["steps"]
        rate = row["batch_size"] / 9600
        assert compute_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=1e-5) <= 3
        assert row["signal_to_noise"] == pytest.approx(row["batch_size"] / sigma)
        assert row["signal_to_noise_over_the_run"] == pytest.approx(math.sqrt(steps) * row["batch_size"] / sigma)
    assert path.read_bytes().startswith(b"\x89PNG")
    _, out, _ = run(capsys, *arguments, "--accountant", "zcdp")
    assert len(out.splitlines()) == 7 and "no amplification" in out


def test_a_missing_delta_is_a_rule_of_thumb_and_says_so(capsys):
    code, _, err = run(
        capsys,
        "epsilon",
        "--dataset-size",
        "9600",
        "--batch-size",
        "256",
        "--steps",
        "375",
        "--noise-multiplier",
        "1.1",
    )
    assert code == 0 and "rule of thumb" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["epsilon", *RUN, "--steps", "3", "--noise-multiplier", "1"], "--epochs and --steps"),
        (["epsilon", *RUN, "--noise-multiplier", "-1"], "noise_multiplier"),
        (["epsilon", *RUN, "--noise-multiplier", "1", "--delta", "2"], "delta"),
        (["noise", *RUN, "--target-epsilon", "0"], "target_epsilon"),
        (["noise", *RUN, "--target-epsilon", "1", "--batch-size", "10000"], "--batch-size"),
        (["plan", "--target-epsilon", "1", "--dataset-size", "100", "--delta", "1e-5", "--epochs", "x"], "--epochs"),
        (["plan", "--target-epsilon", "1", "--dataset-size", "100", "--delta", "1e-5", "--accountant", "x"], "rdp"),
    ],
)
def test_bad_arguments_end_with_one_sentence(capsys, arguments, message):
    code, _, err = run(capsys, *arguments)
    assert code == 2 and message in err and "Traceback" not in err
