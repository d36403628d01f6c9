"""Only a model whose ledger holds, and whose ε is within the limit, leaves the building."""

from __future__ import annotations

import json
import shutil

import numpy as np
import paddle
import pytest
from paddle.static import InputSpec

from paddle_privacy.errors import LedgerError, PrivacyBudgetExceeded, PrivacyError
from paddle_privacy.release import check_release, export_for_inference
from paddle_privacy.verify.chain import head_path

from .conftest import build_model, train

SPEC = [InputSpec([None, 6], "float32", name="x")]
DELTA = 1e-4


@pytest.fixture(autouse=True)
def only_rdp(monkeypatch):
    """Seconds saved: the gate decides by the run's own accountant, the others only fill the report."""
    monkeypatch.setattr("paddle_privacy.report.facts.ACCOUNTANTS", ("rdp",))


def predict(prefix, inputs):
    """Logits of the exported files, through Paddle Inference."""
    from paddle import inference

    model = next(prefix.with_name(prefix.name + suffix) for suffix in (".json", ".pdmodel") if exists(prefix, suffix))
    config = inference.Config(str(model), str(prefix) + ".pdiparams")
    config.disable_gpu()
    config.disable_glog_info()
    predictor = inference.create_predictor(config)
    predictor.get_input_handle(predictor.get_input_names()[0]).copy_from_cpu(inputs)
    predictor.run()
    return predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()


def exists(prefix, suffix):
    return prefix.with_name(prefix.name + suffix).is_file()


def test_a_model_within_the_limit_is_released_and_predicts_the_same(trained, tmp_path):
    model, ledger, epsilon = trained
    prefix = tmp_path / "out" / "classifier"
    model.train()
    manifest = export_for_inference(model, SPEC, prefix, ledger, max_epsilon=epsilon + 0.1, delta=DELTA)
    assert model.training, "the mode is restored"
    inputs = np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32)
    model.eval()
    np.testing.assert_allclose(predict(prefix, inputs), model(paddle.to_tensor(inputs)).numpy(), rtol=1e-5, atol=1e-6)
    assert manifest["epsilon"] == pytest.approx(epsilon, rel=1e-9)
    assert check_release(prefix) == json.loads((tmp_path / "out" / "classifier.manifest.json").read_text())
    report = (tmp_path / "out" / "classifier.report.zh.html").read_text(encoding="utf-8")
    assert "差分隐私报告" in report
    assert sorted(tmp_path.joinpath("out").iterdir()) == sorted(
        [*(tmp_path / "out" / name for name in manifest["files"]), tmp_path / "out" / "classifier.manifest.json"]
    ), "no scratch files stay"


def test_above_the_limit_nothing_is_written(trained, tmp_path):
    model, ledger, epsilon = trained
    with pytest.raises(PrivacyBudgetExceeded, match="must not be released"):
        export_for_inference(model, SPEC, tmp_path / "m", ledger, max_epsilon=epsilon * 0.99, delta=DELTA)
    with pytest.raises(PrivacyBudgetExceeded):
        export_for_inference(model, SPEC, tmp_path / "m", ledger, max_epsilon=epsilon, delta=DELTA / 100)
    assert list(tmp_path.iterdir()) == []


def copy_ledger(ledger, folder):
    shutil.copy(ledger, folder / "l.jsonl")
    shutil.copy(head_path(ledger), folder / "l.jsonl.head")
    return folder / "l.jsonl"


def test_a_damaged_or_missing_ledger_stops_the_export(trained, tmp_path):
    model, ledger, _ = trained
    copy = copy_ledger(ledger, tmp_path)
    lines = copy.read_bytes().splitlines(keepends=True)
    copy.write_bytes(b"".join(lines[:-3]))
    for path in (copy, tmp_path / "nowhere.jsonl"):
        with pytest.raises(LedgerError):
            export_for_inference(model, SPEC, tmp_path / "m", path, max_epsilon=100.0, delta=DELTA)
    assert not list(tmp_path.glob("m.*"))


def test_a_ledger_of_another_model_stops_the_export(trained, tmp_path):
    _, ledger, _ = trained
    other = paddle.nn.Linear(6, 3)
    with pytest.raises(PrivacyError, match="fingerprint"):
        export_for_inference(other, SPEC, tmp_path / "m", ledger, max_epsilon=100.0, delta=DELTA)


def test_seeded_noise_is_never_released(tmp_path):
    model, _ = train(tmp_path / "l.jsonl", epochs=1, seeded=True)
    with pytest.raises(PrivacyError, match="seed"):
        export_for_inference(model, SPEC, tmp_path / "m", tmp_path / "l.jsonl", max_epsilon=100.0, delta=DELTA)


def test_no_noise_is_never_released(tmp_path):
    model, _ = train(tmp_path / "l.jsonl", epochs=1, noise_multiplier=0.0)
    with pytest.raises(PrivacyBudgetExceeded, match="inf"):
        export_for_inference(model, SPEC, tmp_path / "m", tmp_path / "l.jsonl", max_epsilon=1e6, delta=DELTA)


def test_two_runs_on_one_ledger_are_added_up(tmp_path):
    path = tmp_path / "l.jsonl"
    _, first = train(path)
    model, _ = train(path)
    once = first.get_privacy_spent(DELTA).epsilon
    with pytest.raises(PrivacyBudgetExceeded):
        export_for_inference(model, SPEC, tmp_path / "m", path, max_epsilon=once + 0.01, delta=DELTA)
    manifest = export_for_inference(model, SPEC, tmp_path / "m", path, max_epsilon=100.0, delta=DELTA)
    assert manifest["epsilon"] > once + 0.1


@pytest.mark.parametrize("victim", ["m.pdiparams", "m.report.en.html", "m.manifest.json"])
def test_the_receiver_notices_exchanged_files(trained, tmp_path, victim):
    model, ledger, _ = trained
    export_for_inference(model, SPEC, tmp_path / "m", ledger, max_epsilon=100.0, delta=DELTA)
    check_release(tmp_path / "m")
    file = tmp_path / victim
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(PrivacyError):
        check_release(tmp_path / "m")
    file.unlink()
    with pytest.raises(PrivacyError):
        check_release(tmp_path / "m")


def test_the_receiver_has_a_limit_of_its_own(trained, tmp_path):
    model, ledger, epsilon = trained
    export_for_inference(model, SPEC, tmp_path / "m", ledger, max_epsilon=100.0, delta=DELTA)
    with pytest.raises(PrivacyBudgetExceeded):
        check_release(tmp_path / "m", max_epsilon=epsilon / 2)
    (tmp_path / "m.json").touch()
    (tmp_path / "m.pdmodel").touch()
    with pytest.raises(PrivacyError):
        check_release(tmp_path / "m")


def test_a_failed_export_leaves_nothing(trained, tmp_path, monkeypatch):
    model, ledger, _ = trained
    monkeypatch.setattr(
        "paddle_privacy.release.write_report", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        export_for_inference(model, SPEC, tmp_path / "m", ledger, max_epsilon=100.0, delta=DELTA)
    assert list(tmp_path.iterdir()) == []
    assert build_model() is not None
