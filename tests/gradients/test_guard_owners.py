"""Several optimizers, models and threads: none sees what belongs to another."""

from __future__ import annotations

import gc
import threading
import warnings

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_privacy import PrivacyError, PrivacyWarning
from tests.gradients.guarded import _seeded, exactly, optimizer, step  # noqa: F401


def test_new_optimizer_supersedes_the_old_one():
    model = nn.Sequential(nn.Linear(3, 1))
    old = optimizer(model)
    (model(paddle.randn([4, 3])) ** 2).mean().backward()
    new = optimizer(model, clip_norm=1.0)
    x = paddle.randn([4, 3])
    (model(x) ** 2).mean().backward()
    with pytest.raises(
        PrivacyError,
        match=exactly(
            "another private optimizer was built over parameters ['0.weight', '0.bias'], and this one's hooks were "
            "taken off; step() the newer optimizer"
        ),
    ):
        old.step()
    new.step()
    assert new.last_norms.shape == [4]


def test_refused_optimizer_leaves_the_old_one_in_place():
    model = nn.Sequential(nn.Linear(3, 1))
    old = optimizer(model)
    with pytest.raises(ValueError, match="clip_norm must be greater than 0"):
        optimizer(model, clip_norm=-1.0)
    step(model, old, paddle.randn([4, 3]))


def test_dropped_optimizer_leaves_no_hooks():
    model = nn.Sequential(nn.Linear(3, 1))
    opt = optimizer(model)
    assert model[0]._forward_pre_hooks
    del opt
    gc.collect()
    for layer in model.sublayers(include_self=True):
        assert not layer._forward_pre_hooks and not layer._forward_post_hooks


def test_two_optimizers_on_disjoint_parts():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = paddle.randn([4, 3])
    (model(x) ** 2).mean().backward()
    expected = [p.grad.numpy() for p in model.parameters()]
    model.clear_gradients()
    one = optimizer(list(model[0].parameters()))
    with pytest.warns(PrivacyWarning, match="^two private optimizers train parts of one model; each states the ε of"):
        two = optimizer(list(model[2].parameters()))
    (model(x) ** 2).mean().backward()
    one.step()
    two.step()
    for parameter, gradient in zip(model.parameters(), expected):
        np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-4, atol=1e-6)


def test_two_models_do_not_meet():
    models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        opts = [optimizer(model) for model in models]
    x = paddle.randn([4, 3])
    losses = [(model(x) ** 2).mean() for model in models]
    losses[1].backward()
    losses[0].backward()
    for opt in opts:
        opt.step()
        assert opt.last_norms.shape == [4]


def test_threads_run_other_models_and_evaluate_this_one():
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = paddle.randn([4, 3])
    (model(x) ** 2).mean().backward()
    expected = [p.grad.numpy() for p in model.parameters()]
    model.clear_gradients()
    opt = optimizer(model)
    other = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    other_opt = optimizer(other)
    stop, errors = threading.Event(), []

    def evaluate():
        try:
            while not stop.is_set():
                with paddle.no_grad():
                    model(x)
        except Exception as error:
            errors.append(error)

    def train_other():
        try:
            while not stop.is_set():
                step(other, other_opt, paddle.randn([5, 3]))
                other_opt.clear_grad()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=f) for f in (evaluate, train_other)]
    for thread in threads:
        thread.start()
    try:
        start = [p.numpy() for p in model.parameters()]
        for _ in range(30):
            (model(x) ** 2).mean().backward()
            opt.step()
            for parameter, gradient, value in zip(model.parameters(), expected, start):
                np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-4, atol=1e-6)
                parameter.set_value(paddle.to_tensor(value))
            opt.clear_grad()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
