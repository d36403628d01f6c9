"""A private optimizer without noise whose gradients can be read, for the attacks of test_guard_*.py."""

from __future__ import annotations

import gc
import re

import paddle
import pytest
from paddle import nn

from paddle_privacy import DPSGD


def optimizer(model, batch_size=4, **kwargs):
    kwargs.setdefault("clip_norm", 1e6)
    return DPSGD(
        parameters=model.parameters() if isinstance(model, nn.Layer) else model,
        learning_rate=0.1,
        noise_multiplier=0.0,
        batch_size=batch_size,
        sampling="none",
        **kwargs,
    )


def step(model, opt, *inputs):
    (model(*inputs) ** 2).mean().backward()
    opt.step()


def exactly(message):
    return "^" + re.escape(message) + "$"


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    """Also: gradients are published as ``.grad`` before Paddle's own update, so that tests can compare them."""
    monkeypatch.setattr("paddle_privacy.optimizer.fused_update", lambda *args: False)
    paddle.seed(0)
    gc.collect()
