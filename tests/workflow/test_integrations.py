"""paddle.Model and VisualDL, and the examples that show them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.io import DataLoader, TensorDataset

from paddle_privacy import DPSGD, PoissonBatchSampler
from paddle_privacy.accounting import compute_epsilon
from paddle_privacy.errors import PrivacyError, PrivacyWarning
from paddle_privacy.integrations.hapi import PrivacyCallback
from paddle_privacy.integrations.visualdl import PrivacyLogger, VisualDLCallback

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

ROWS = TensorDataset(
    [np.random.RandomState(0).randn(40, 4).astype("float32"), np.random.RandomState(1).randint(0, 2, 40)]
)


def prepared(optimizer=None, amp=None, **sampling):
    """A prepared paddle.Model, its private optimizer and its Poisson loader."""
    loader = DataLoader(ROWS, batch_sampler=PoissonBatchSampler(ROWS, batch_size=8, **sampling))
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = optimizer or DPSGD(
        0.1, parameters=network.parameters(), clip_norm=1.0, noise_multiplier=1.0, batch_size=8, data_loader=loader
    )
    spec = paddle.static.InputSpec
    model = paddle.Model(network, spec([None, 4], "float32", "x"), spec([None], "int64", "y"))
    model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy(), amp_configs=amp)
    return model, optimizer, loader


def test_the_opacus_example():
    import opacus_style

    result = opacus_style.main(["--epochs", "2", "--rows", "600", "--epsilon", "8"])
    assert 7.9 < result["epsilon"] <= 8.0
    assert result["optimizer"].spending.steps == 12
    assert result["accuracy"] > 0.5


def test_the_paddle_model_example(tmp_path, capsys):
    import paddle_model

    result = paddle_model.main(["--epochs", "3", "--rows", "1000", "--log-dir", str(tmp_path)])
    said = capsys.readouterr().out
    assert result["optimizer"].spending.steps == 21
    assert 3.9 < result["epsilon"] <= 4.0
    assert said.count("epsilon: ") >= 3
    assert list(tmp_path.iterdir())


def test_the_progress_bar_shows_the_epsilon_of_the_step_it_shows(capsys):
    model, optimizer, loader = prepared()
    model.fit(loader, epochs=2, callbacks=[PrivacyCallback(1e-5, log_freq=2)], verbose=0)
    shown = [
        float(line.split("epsilon: ")[1].split(" ")[0])
        for line in capsys.readouterr().out.splitlines()
        if "epsilon: " in line
    ]
    steps = [2, 4, 5, 7, 9, 10]  # five steps an epoch, shown every second and at the end; 2 and 4 restart each epoch
    want = [compute_epsilon(noise_multiplier=1.0, sample_rate=0.2, steps=k, delta=1e-5) for k in steps]
    np.testing.assert_allclose(shown, want, atol=6e-5)


@pytest.mark.parametrize("pieces", [1, 3])
def test_fit_with_split_batches_counts_logical_steps(pieces):
    model, optimizer, loader = prepared(**({"micro_batches": 3} if pieces == 3 else {"max_physical_batch_size": 3}))
    model.fit(loader, epochs=2, callbacks=[PrivacyCallback(1e-5, verbose=0)], verbose=0, accumulate_grad_batches=pieces)
    assert optimizer.spending.steps == 10


@pytest.mark.parametrize(
    ("arguments", "fit", "says"),
    [
        ({}, {"accumulate_grad_batches": 2}, "micro_batches=2"),
        ({"amp": "O1"}, {}, "amp_configs"),
        ({"optimizer": "plain"}, {}, "trains without privacy"),
    ],
)
def test_settings_under_which_an_update_would_be_another_are_refused(arguments, fit, says):
    if arguments.get("optimizer"):
        arguments = {"optimizer": paddle.optimizer.SGD(0.1, parameters=nn.Linear(1, 1).parameters())}
    model, optimizer, loader = prepared(**arguments)
    with pytest.raises(PrivacyError, match=says):
        model.fit(loader, callbacks=[PrivacyCallback(1e-5, verbose=0)], verbose=0, **fit)


def test_a_missing_delta_is_said_before_training():
    model, optimizer, loader = prepared()
    with pytest.raises(ValueError, match="delta"):
        model.fit(loader, callbacks=[PrivacyCallback()], verbose=0)
    assert optimizer.spending.steps == 0


def scalars(folder) -> dict[str, list]:
    from visualdl import LogReader

    (file,) = folder.iterdir()
    reader = LogReader(file_path=str(file))
    return {tag: reader.get_data("scalar", tag) for tag in reader.get_tags()["scalar"]}


@pytest.mark.parametrize("raw", [False, True])
def test_visualdl_keeps_private_and_raw_curves_apart(tmp_path, raw):
    model, optimizer, loader = prepared()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(loader, epochs=1, callbacks=[VisualDLCallback(tmp_path, delta=1e-5, raw_statistics=raw)], verbose=0)
    assert raw == any(issubclass(w.category, PrivacyWarning) and "does not" in str(w.message) for w in said)
    curves = scalars(tmp_path)
    assert {
        "privacy/epsilon",
        "privacy/noise_multiplier",
        "privacy/clip_norm",
        "privacy/learning_rate",
    } <= curves.keys()
    assert any(tag.startswith("not_private/") for tag in curves) == raw
    assert [point.id for point in curves["privacy/epsilon"]] == [1, 2, 3, 4, 5]
    for point in curves["privacy/epsilon"]:
        want = compute_epsilon(noise_multiplier=1.0, sample_rate=0.2, steps=point.id, delta=1e-5)
        assert point.value == pytest.approx(want, rel=1e-6)
    if raw:
        assert {
            "not_private/loss",
            "not_private/clip_fraction",
            "not_private/gradient_norm_quantile_0.5",
        } <= curves.keys()


def test_visualdl_shows_the_noised_clip_fraction_of_adaptive_clipping(tmp_path):
    """Without noise on the count it would be the true fraction; with σ_b far below a row it nearly is."""
    from paddle_privacy.clipping import AdaptiveClipping

    network = nn.Linear(4, 2)
    clipping = AdaptiveClipping(0.5, quantile=0.6, count_noise=1e-3)
    optimizer = DPSGD(
        0.0, parameters=network.parameters(), noise_multiplier=0.0, clipping=clipping, batch_size=10, sampling="none"
    )
    x = paddle.to_tensor(ROWS.tensors[0][:10])
    with PrivacyLogger(tmp_path, optimizer, delta=1e-5) as logger:
        for _ in range(3):
            bound = optimizer.clip_norm
            (network(x) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            above = float((optimizer.last_norms.numpy() > bound).mean())
            logger.step()
    curves = scalars(tmp_path)
    assert curves["privacy/clip_fraction (noised)"][-1].value == pytest.approx(above, abs=2e-3)
    assert "privacy/clip_norm (noised 0.6-quantile of gradient norms)" in curves
