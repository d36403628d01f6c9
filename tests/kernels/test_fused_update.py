"""The fused pass against the same noise followed by Paddle's own optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_privacy.kernels import native
from paddle_privacy.kernels.fused_update import fused_update
from paddle_privacy.noise import NoiseGenerator

opt = paddle.optimizer
pytestmark = pytest.mark.skipif(native.state().device is None, reason="the native operators cannot be built here")

RULES = {
    "sgd": (opt.SGD, {}),
    "sgd_l2": (opt.SGD, {"weight_decay": 0.1}),
    "momentum": (opt.Momentum, {"momentum": 0.9}),
    "momentum_l2": (opt.Momentum, {"momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (opt.Momentum, {"momentum": 0.8, "use_nesterov": True, "weight_decay": 0.01}),
    "adam": (opt.Adam, {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6}),
    "adam_l2": (opt.Adam, {"weight_decay": 0.1}),
    "adamw": (opt.AdamW, {"weight_decay": 0.1}),
    "adamw_some": (opt.AdamW, {"weight_decay": 0.1, "apply_decay_param_fun": lambda name: "w" in name}),
}


def _parameters(dtype: str) -> list[paddle.Tensor]:
    paddle.seed(3)
    shapes = [[7, 40], [1000], [1]]
    parameters = [paddle.create_parameter(shape, "float32") for shape in shapes]
    for parameter in parameters:
        parameter.set_value(paddle.randn(parameter.shape))
    parameters[1].optimize_attr = {"learning_rate": 0.5}
    return parameters if dtype == "float32" else [_cast(p, dtype) for p in parameters]


def _cast(parameter: paddle.Tensor, dtype: str) -> paddle.Tensor:
    layer = paddle.nn.Layer()
    layer.narrow = layer.create_parameter(parameter.shape)
    layer.narrow.set_value(parameter)
    layer.narrow.optimize_attr = parameter.optimize_attr
    layer.to(dtype=dtype)
    return layer.narrow


def _sums(step: int) -> list[paddle.Tensor]:
    rng = np.random.default_rng(step)
    return [paddle.to_tensor(rng.standard_normal(shape).astype("float32") * 4) for shape in ([7, 40], [1000], [1])]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("hardening", ["none", "grid", "sum"])
def test_equals_noise_then_paddle(name: str, hardening: str) -> None:
    kind, arguments = RULES[name]
    results = []
    for fused in (True, False):
        parameters = _parameters("float32")
        scheduler = opt.lr.StepDecay(learning_rate=0.05, step_size=2, gamma=0.5)
        optimizer = kind(learning_rate=scheduler, parameters=parameters, **arguments)
        generator = NoiseGenerator.seeded(11, hardening=hardening)
        for step in range(4):
            sums = _sums(step)
            std = [1.5, 0.5, 0.0]
            if fused:
                assert fused_update(optimizer, parameters, sums, generator, std, 8.0)
                for total, original in zip(sums, _sums(step)):
                    assert (total.numpy() == original.numpy()).all()
            else:
                generator.add_noise(sums, std)
                for parameter, total in zip(parameters, sums):
                    parameter.grad = total / 8.0
                optimizer.step()
                optimizer.clear_grad()
            scheduler.step()
        state: dict[str, Any] = optimizer.state_dict()
        kept = [value.numpy() for value in state.values() if isinstance(value, paddle.Tensor)]
        results.append([p.numpy() for p in parameters] + kept)
    assert len(results[0]) == len(results[1])
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_master_weights(name: str, dtype: str) -> None:
    kind, arguments = RULES[name]
    wide = _parameters("float32")
    narrow = _parameters(dtype)
    for one, other in zip(wide, narrow):
        one.set_value(other.astype("float32"))
    both = []
    for parameters, masters in ((wide, False), (narrow, True)):
        optimizer = kind(learning_rate=0.05, parameters=parameters, multi_precision=masters, **arguments)
        generator = NoiseGenerator.seeded(2)
        for step in range(3):
            if not fused_update(optimizer, parameters, _sums(step), generator, 1.0, 8.0):
                pytest.skip("this Paddle has no float16 parameters on the CPU")
        both.append(optimizer)
    for one, other in zip(wide, narrow):
        assert (both[1]._master_weights[other.name].numpy() == one.numpy()).all()
        # Paddle 3.0's own cast to float16 truncates, numpy's rounds.
        rounded = one.numpy().astype("float16") if dtype == "float16" else one.astype(dtype).astype("float32").numpy()
        assert (rounded.astype("float32") == other.astype("float32").numpy()).all()


class _OwnRule(opt.SGD):
    def _append_optimize_op(self, block: Any, pair: Any) -> None:
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (opt.Adamax, {}),
        (_OwnRule, {}),
        (opt.Adam, {"amsgrad": True}),
        (opt.SGD, {"grad_clip": paddle.nn.ClipGradByGlobalNorm(1.0)}),
        (opt.SGD, {"weight_decay": paddle.regularizer.L1Decay(0.1)}),
    ],
)
def test_declines_what_it_does_not_reproduce(kind: Any, arguments: dict[str, Any]) -> None:
    parameters = _parameters("float32")
    before = [p.numpy() for p in parameters]
    optimizer = kind(learning_rate=0.1, parameters=parameters, **arguments)
    generator = NoiseGenerator.seeded(1)
    assert not fused_update(optimizer, parameters, _sums(0), generator, 1.0, 8.0)
    assert all((p.numpy() == b).all() for p, b in zip(parameters, before))
    assert (generator.standard_normal(4) == NoiseGenerator.seeded(1).standard_normal(4)).all()


def test_subclasses_that_inherit_the_rule_are_served() -> None:
    class Renamed(opt.AdamW):
        pass

    parameters = _parameters("float32")
    assert fused_update(Renamed(0.1, parameters=parameters), parameters, _sums(0), NoiseGenerator(), 1.0, 8.0)
