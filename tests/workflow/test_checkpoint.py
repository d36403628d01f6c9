"""Checkpoints: whole or refused, ε continues exactly, noise does not repeat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import paddle
import pytest
import safetensors.numpy
from paddle import io, nn

from paddle_privacy.checkpoint import MANIFEST, load_checkpoint, save_checkpoint
from paddle_privacy.engine import PrivacyEngine
from paddle_privacy.errors import LedgerError, PrivacyError
from paddle_privacy.optimizer import DPSGD, DPAdamW

ROWS = np.random.RandomState(0).randn(40, 4).astype("float32")
HERE = Path(__file__).parent


def model_of(seed: int = 0, width: int = 5) -> nn.Layer:
    paddle.seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 2))


def optimizer_of(model: nn.Layer, optimizer=DPAdamW, **changed):
    schedule = paddle.optimizer.lr.StepDecay(0.05, 2)
    arguments = {"clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 8, "sampling": "poisson", "dataset_size": 40}
    return optimizer(schedule, parameters=model, **{**arguments, **changed})


def step(model, optimizer, batch: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the declared sampling is a test's
        (model(paddle.to_tensor(ROWS[batch * 8 : batch * 8 + 8])) ** 2).mean().backward()
        optimizer.step()
    optimizer._learning_rate.step()
    optimizer.clear_grad()


def weights(model) -> list[np.ndarray]:
    return [p.numpy() for p in model.parameters()]


@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
def test_training_continues_where_it_stopped(tmp_path, clipping):
    """Without noise in the gradients, the resumed run is the uninterrupted one, step for step; ε is its ε."""
    runs = []
    for stopped in (False, True):
        model = model_of()
        optimizer = optimizer_of(model, noise_multiplier=0.0 if clipping == "flat" else 1e-6, clipping=clipping)
        for batch in range(2):
            step(model, optimizer, batch)
        if stopped:
            bound = optimizer.clip_norm
            save_checkpoint(tmp_path, model=model, optimizer=optimizer, extra={"epoch": 1})
            model = model_of(seed=9)
            optimizer = optimizer_of(model, noise_multiplier=0.5, clipping=clipping)
            assert load_checkpoint(tmp_path, model=model, optimizer=optimizer) == {"epoch": 1}
            assert optimizer.clip_norm == bound
            assert optimizer.spending.steps == 2
        for batch in range(2, 5):
            step(model, optimizer, batch)
        runs.append((weights(model), optimizer))
    (through, one), (resumed, two) = runs
    if clipping == "flat":
        for a, b in zip(through, resumed):
            np.testing.assert_array_equal(a, b)
        assert one.get_lr() == two.get_lr()
    assert two.accountant.history == one.accountant.history
    assert two.noise_multiplier == one.noise_multiplier


def test_epsilon_continues_and_noise_is_fresh(tmp_path):
    model = model_of()
    optimizer = optimizer_of(model, DPSGD)
    for batch in range(3):
        step(model, optimizer, batch)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    after = []
    for _ in range(2):
        model = model_of(seed=5)
        optimizer = optimizer_of(model, DPSGD)
        load_checkpoint(tmp_path, model=model, optimizer=optimizer)
        spent = optimizer.get_privacy_spent(1e-5).epsilon
        step(model, optimizer, 3)
        assert optimizer.get_privacy_spent(1e-5).epsilon > spent
        after.append(np.concatenate([w.ravel() for w in weights(model)]))
    assert (after[0] != after[1]).mean() > 0.9


def test_parameters_are_found_by_their_path_whatever_the_process_called_them(tmp_path):
    model = model_of()
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    moments = {k: v.numpy() for k, v in optimizer.state_dict().items() if isinstance(v, paddle.Tensor)}
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    for _ in range(3):
        nn.Linear(1, 1)
    other = model_of(seed=1)
    assert other[0].weight.name != model[0].weight.name
    again = optimizer_of(other, noise_multiplier=0.0)
    load_checkpoint(tmp_path, model=other, optimizer=again)
    again._learning_rate.step()
    held = again._accumulators_holder
    name = f"{other[0].weight.name}_moment1_0"
    np.testing.assert_array_equal(held[name].numpy(), moments[f"{model[0].weight.name}_moment1_0"])


def test_files_are_safetensors_and_json(tmp_path):
    model = model_of()
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [MANIFEST, *(entry["name"] for entry in manifest["files"].values())]
    )
    stored = safetensors.numpy.load_file(tmp_path / manifest["files"]["model"]["name"])
    assert stored.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(stored[name], value.numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64", "bool"])
def test_every_dtype_and_shape_survives(tmp_path, dtype):
    from paddle_privacy.checkpoint import _deserialize, _serialize

    for shape in ([], [0, 3], [2, 3, 1]):
        tensor = paddle.ones(shape).astype(dtype)
        (back,) = _deserialize(_serialize({"x": tensor})).values()
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(back.numpy(), tensor.numpy())


def damage(kind: str, folder: Path) -> None:
    manifest = folder / MANIFEST
    model = next(folder.glob("model-*"))
    if kind == "truncated":
        model.write_bytes(model.read_bytes()[:-7])
    elif kind == "flipped":
        data = bytearray(model.read_bytes())
        data[-3] ^= 1
        model.write_bytes(bytes(data))
    elif kind == "missing":
        model.unlink()
    elif kind == "manifest torn":
        manifest.write_bytes(manifest.read_bytes()[:-40])
    elif kind == "manifest edited":
        manifest.write_text(manifest.read_text().replace('"steps": 1', '"steps": 0'))
    elif kind == "swapped":
        optimizer = next(folder.glob("optimizer-*"))
        data = model.read_bytes()
        model.write_bytes(optimizer.read_bytes())
        optimizer.write_bytes(data)
    elif kind == "other format":
        manifest.write_text('{"format": "else"}')
    elif kind == "gone":
        manifest.unlink()


@pytest.mark.parametrize(
    "kind", ["truncated", "flipped", "missing", "manifest torn", "manifest edited", "swapped", "other format", "gone"]
)
def test_a_damaged_checkpoint_is_refused_whole(tmp_path, kind):
    model = model_of()
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    damage(kind, tmp_path)
    fresh = model_of(seed=3)
    before, other = weights(fresh), optimizer_of(fresh, noise_multiplier=2.0)
    with pytest.raises(PrivacyError):
        load_checkpoint(tmp_path, model=fresh, optimizer=other)
    assert all((a == b).all() for a, b in zip(weights(fresh), before))
    assert other.noise_multiplier == 2.0 and other.accountant.history == []


def test_another_model_is_refused(tmp_path):
    model = model_of()
    save_checkpoint(tmp_path, model=model, optimizer=optimizer_of(model))
    wider = model_of(width=7)
    with pytest.raises(PrivacyError, match="another model"):
        load_checkpoint(tmp_path, model=wider, optimizer=optimizer_of(wider))


def test_what_cannot_be_stored_is_said_and_the_old_checkpoint_stays(tmp_path):
    model = model_of()
    optimizer = optimizer_of(model)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, extra={"epoch": 1})
    with pytest.raises(TypeError, match="JSON"):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, extra={"rng": object()})
    assert load_checkpoint(tmp_path, model=model, optimizer=optimizer) == {"epoch": 1}
    assert len(list(tmp_path.iterdir())) == 3


def test_steps_after_the_checkpoint_are_counted_from_the_ledger(tmp_path):
    model = model_of()
    optimizer = optimizer_of(model, ledger=tmp_path / "ledger")
    step(model, optimizer, 0)
    save_checkpoint(tmp_path / "saved", model=model, optimizer=optimizer)
    for batch in range(1, 4):
        step(model, optimizer, batch)
    spent = optimizer.get_privacy_spent(1e-5)
    optimizer._ledger.close()

    resumed = optimizer_of(model, ledger=tmp_path / "ledger")
    load_checkpoint(tmp_path / "saved", model=model, optimizer=resumed)
    assert resumed.get_privacy_spent(1e-5) == spent
    assert resumed.spending.steps == 4

    with pytest.raises(PrivacyError, match="ledger="):
        load_checkpoint(tmp_path / "saved", model=model, optimizer=optimizer_of(model))
    with pytest.raises(PrivacyError, match="missing"):
        load_checkpoint(tmp_path / "saved", model=model, optimizer=optimizer_of(model, ledger=tmp_path / "elsewhere"))
    text = (tmp_path / "ledger").read_text().splitlines(keepends=True)
    (tmp_path / "ledger").write_text("".join(text[:-1]))
    with pytest.raises(LedgerError):
        load_checkpoint(tmp_path / "saved", model=model, optimizer=optimizer_of(model, ledger=tmp_path / "ledger"))


def test_steps_that_charge_nothing_are_counted_as_steps(tmp_path):
    """Shuffled batches: one charge a pass, at its first step; the others are in the ledger all the same."""
    loader = io.DataLoader(io.TensorDataset([ROWS]), batch_size=8, shuffle=True)

    def optimizer_on(model):
        return DPSGD(
            0.1,
            parameters=model,
            clip_norm=1.0,
            noise_multiplier=1.0,
            batch_size=8,
            data_loader=loader,
            ledger=tmp_path / "ledger",
        )

    model = model_of()
    optimizer = optimizer_on(model)
    save_checkpoint(tmp_path / "saved", model=model, optimizer=optimizer)
    for _ in range(2):
        for (x,) in loader:
            (model(x) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
    optimizer._ledger.close()
    resumed = optimizer_on(model)
    load_checkpoint(tmp_path / "saved", model=model, optimizer=resumed)
    assert resumed.spending.steps == 10
    assert resumed.get_privacy_spent(1e-5).epsilon == pytest.approx(optimizer.get_privacy_spent(1e-5).epsilon)


def test_a_new_run_on_an_old_ledger_starts_from_what_it_holds(tmp_path):
    def run(steps: int) -> float:
        model, engine = model_of(), PrivacyEngine()
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()),
            data_loader=io.DataLoader(io.TensorDataset([ROWS]), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            ledger=tmp_path / "ledger",
        )
        begun = engine.get_epsilon(1e-5)
        for _, (x,) in zip(range(steps), loader):
            (model(x) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        optimizer._ledger.close()
        return begun, engine.get_epsilon(1e-5)

    first = run(3)
    second = run(2)
    assert first[0] == 0
    assert second[0] == first[1] < second[1]


def test_the_engine_keeps_checkpoints(tmp_path):
    def make():
        model, engine = model_of(), PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=paddle.optimizer.Momentum(0.1, parameters=model.parameters()),
            data_loader=io.DataLoader(io.TensorDataset([ROWS]), batch_size=8, shuffle=True),
            noise_multiplier=1.3,
            max_grad_norm=1.0,
        )
        return engine, model, optimizer, loader

    engine, model, optimizer, loader = make()
    for (x,) in loader:
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    engine.save_checkpoint(path=tmp_path, module=model, extra={"epoch": 1})
    again, other, _, _ = make()
    assert again.load_checkpoint(path=tmp_path, module=other) == {"epoch": 1}
    assert again.get_epsilon(1e-5) == engine.get_epsilon(1e-5) > 0
    with pytest.raises(ValueError, match="optimizer must be one that this engine made"):
        again.save_checkpoint(path=tmp_path, module=model, optimizer=optimizer)


def test_fifty_kills_never_lose_a_release(tmp_path):
    """At each resume: what the account holds is at least the noise releases made, and at most one more a kill."""
    kills = 50
    done = subprocess.run(
        [sys.executable, str(HERE / "kill_and_resume.py"), str(tmp_path), str(kills), "20260101"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert len(reports) > kills / 2
    assert reports[-1]["releases"] > 0
    for report in reports:
        assert report["releases"] <= report["counted"] <= report["releases"] + kills
