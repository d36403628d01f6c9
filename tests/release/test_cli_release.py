"""The commands: what they print, what they write, and the exit status a script relies on."""

from __future__ import annotations

import json
import shutil

import paddle
import pytest

from paddle_privacy.cli import main
from paddle_privacy.verify.chain import head_path

from .conftest import build_model


@pytest.fixture(autouse=True)
def only_rdp(monkeypatch):
    """Seconds saved where the numbers of the other accountants are not looked at."""
    monkeypatch.setattr("paddle_privacy.report.facts.ACCOUNTANTS", ("rdp",))


@pytest.fixture
def run(trained, tmp_path):
    """A run folder with a copy of the ledger."""
    _, ledger, _ = trained
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(ledger, folder / "ledger.jsonl")
    shutil.copy(head_path(ledger), folder / "ledger.jsonl.head")
    (folder / "summary.json").write_text(json.dumps({"test_accuracy": 0.875, "seconds": 3}))
    return folder


def status(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code or 0


def test_verify(run, trained, capsys):
    assert status("verify", run) == 0
    printed = capsys.readouterr().out
    assert "verified" in printed and f"{trained[2]:.6g}" in printed and "independent" in printed
    receipt = printed.split("receipt")[1].split()[0]
    assert status("verify", run / "ledger.jsonl", "--receipt", receipt) == 0
    assert status("verify", run, "--receipt", receipt[:-1] + ("0" if receipt[-1] != "0" else "1")) == 1


def test_verify_names_the_first_bad_line(run, capsys):
    path = run / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace('"step":4', '"step":5')
    path.write_text("".join(lines))
    assert status("verify", run) == 1
    assert "line 5" in capsys.readouterr().err


def test_verify_has_a_limit_and_a_delta(run, trained):
    assert status("verify", run, "--max-epsilon", trained[2] + 0.01) == 0
    assert status("verify", run, "--max-epsilon", trained[2] - 0.01) == 1
    assert status("verify", run, "--max-epsilon", trained[2] + 0.01, "--delta", 1e-9) == 1


def test_verify_without_head(run):
    (run / "ledger.jsonl.head").unlink()
    assert status("verify", run) == 1
    assert status("verify", run, "--no-head") == 0
    assert status("verify", run / "nothing.jsonl") == 1


@pytest.mark.parametrize("name, lang", [("r.html", "zh"), ("r.md", "en"), ("r.json", "en")])
def test_report(run, tmp_path, name, lang, capsys):
    output = tmp_path / name
    assert status("report", run, "-o", output, "--lang", lang, "--max-epsilon", "9") == 0
    content = output.read_text(encoding="utf-8")
    assert "test_accuracy" in content and "0.875" in content
    assert str(output) in capsys.readouterr().out


def test_report_with_tuning_and_audit(run, tmp_path):
    audit = tmp_path / "audit.json"
    assert status("audit", "-o", audit, "--canaries", "400", "--steps", "1") == 0
    output = tmp_path / "r.json"
    arguments = ("report", run, "-o", output, "--audit", audit, "--tuning", "papernot-steinke", "--mean-runs", "8")
    assert status(*arguments) == 0
    data = json.loads(output.read_text())
    assert data["tuning"]["mean_runs"] == 8 and data["epsilon"] > data["epsilon_without_tuning"]
    assert len(data["audit"]["bounds"]) == 2
    assert status(*arguments[:4], "--tuning", "grid") == 2
    assert status("report", run, "-o", tmp_path / "r.docx") == 2


def test_report_refuses_a_broken_ledger(run, tmp_path):
    path = run / "ledger.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    assert status("report", run, "-o", tmp_path / "r.html") == 1
    assert not (tmp_path / "r.html").exists()


def test_export(run, trained, tmp_path, capsys):
    model, _, epsilon = trained
    paddle.save(model.state_dict(), str(tmp_path / "m.pdparams"))
    factory = tmp_path / "factory.py"
    factory.write_text("import paddle\n\ndef build():\n    L = paddle.nn.Linear\n")
    factory.write_text(factory.read_text() + "    return paddle.nn.Sequential(L(6, 5), paddle.nn.ReLU(), L(5, 3))\n")
    arguments = ["export", "--model", f"{factory}:build", "--weights", tmp_path / "m.pdparams", "--ledger", run]
    arguments += ["--input-spec", "-1,6:float32", "--delta", 1e-4, "-o", tmp_path / "out" / "m"]
    assert status(*arguments, "--max-epsilon", epsilon / 2) == 1
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    assert status(*arguments, "--max-epsilon", epsilon + 0.1) == 0
    assert "released" in capsys.readouterr().out
    assert (tmp_path / "out" / "m.manifest.json").is_file()
    arguments[2] = f"{factory}:missing"
    assert status(*arguments, "--max-epsilon", 99) == 2
    assert build_model() is not None


def test_audit_of_a_target(tmp_path, capsys):
    target = tmp_path / "leaky.py"
    target.write_text(
        "from paddle_privacy.audit import ScoredRun\n\n"
        "def memorise(coins):\n    return ScoredRun({'it remembers': coins * 1.0}, 1.0, 1e-5)\n"
    )
    assert status("audit", f"{target}:memorise", "-o", tmp_path / "a.json", "--canaries", "500") == 1
    captured = capsys.readouterr()
    assert "the claim is false" in captured.err and "it remembers" in captured.out
    assert json.loads((tmp_path / "a.json").read_text())["refuted"] is True
    assert status("audit", "nowhere.py:f", "-o", tmp_path / "a.json") == 2
    assert status("audit", "nonsense", "-o", tmp_path / "a.json") == 2


def test_selftest(monkeypatch, capsys):
    from paddle_privacy.selftest import Check

    monkeypatch.setattr("paddle_privacy.selftest.run_selftest", lambda ranks: [Check("a", "b", "c", ranks)])
    assert status("selftest") == 0
    assert status("selftest", "--no-ranks") == 1
    assert "FAIL" in capsys.readouterr().out
