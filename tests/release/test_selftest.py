"""The selftest passes on this machine, and each of its checks can fail."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_privacy import NoiseGenerator, selftest
from paddle_privacy.selftest import print_checks, run_selftest


def names_of_failures(checks):
    return [check.name for check in checks if not check.passed]


def test_everything_passes_here():
    checks = run_selftest()
    assert names_of_failures(checks) == []
    lines = []
    assert print_checks(checks, "cpu", lines.append)
    assert lines[-1] == "all checks passed" and len(lines) == len(checks) + 2


@pytest.fixture
def broken_noise(monkeypatch):
    """Replaces the noise by what ``make(shape, std)`` returns; the fused update is off so that it is really used."""
    import paddle

    monkeypatch.setattr("paddle_privacy.optimizer.fused_update", lambda *arguments: False)

    def use(make):
        def add_noise(self, sums, std):
            for part in sums:
                part.add_(paddle.to_tensor(make(tuple(part.shape), std).astype(np.float32)))

        monkeypatch.setattr(NoiseGenerator, "add_noise", add_noise)

    return use


def fresh(shape, std):
    return np.random.default_rng().normal(size=shape) * std


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda shape, std: fresh(shape, std * 0.98), "Noise scale on the sum"),
        (lambda shape, std: fresh(shape, 0.0), "Parameters without a gradient are noised"),
        (lambda shape, std: np.random.default_rng(1).normal(size=shape) * std, "Two steps are independent"),
        (lambda shape, std: np.random.default_rng(1).normal(size=shape) * std, "Two parameters are independent"),
        (
            lambda shape, std: np.random.default_rng().uniform(-1, 1, size=shape) * std * np.sqrt(3),
            "Noise is Gaussian",
        ),
    ],
    ids=["too little", "none", "replayed", "shared", "not Gaussian"],
)
def test_broken_noise_is_found(broken_noise, make, expected):
    broken_noise(make)
    with np.errstate(invalid="ignore"):
        assert expected in names_of_failures(run_selftest(ranks=False))


def test_missing_clipping_is_found(monkeypatch):
    from paddle_privacy.clipping import FlatClipping

    monkeypatch.setattr(FlatClipping, "sensitivity", property(lambda self: 0.5 * selftest.CLIP))
    assert "A huge gradient is clipped (flat)" in names_of_failures(run_selftest(ranks=False))


def test_a_seeded_source_is_found(monkeypatch):
    monkeypatch.setattr(NoiseGenerator, "describe", lambda self: {"kind": "seeded", "secure": False})
    lines = []
    assert not print_checks([selftest._source()], "cpu", lines.append)
    assert "FAIL" in lines[1] and "do not train" in lines[-1]
