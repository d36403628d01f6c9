"""Runs a test on the native operators and on the reference path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paddle_privacy.kernels import native


@pytest.fixture(params=["native", "reference"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "native" and native.state().device is None:
        pytest.skip(f"no native operators: {native.state().reason}")
    if request.param == "reference":
        monkeypatch.setattr(native, "_state", native.Native(None, "switched off by the test"))
    yield request.param
