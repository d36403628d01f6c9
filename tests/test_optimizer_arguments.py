"""Every refused call names the argument and what is allowed, and changes nothing."""

from __future__ import annotations

import inspect

import numpy as np
import paddle
import pytest
from paddle import nn

import paddle_privacy as pp

GOOD = {"learning_rate": 0.1, "clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 8}


def without(*names: str, **changes):
    return {**{k: v for k, v in GOOD.items() if k not in names}, **changes}


REFUSED = [
    (without("clip_norm"), ValueError, "clip_norm is missing"),
    (without(clip_norm=0), ValueError, "clip_norm must be greater than 0, found 0"),
    (without(clip_norm=-1.0), ValueError, "clip_norm must be greater than 0, found -1.0"),
    (without(clip_norm="1"), TypeError, "clip_norm must be a positive number, found '1'"),
    (without(clip_norm=float("nan")), ValueError, "clip_norm must be greater than 0"),
    (without(clip_norm=float("inf")), ValueError, "clip_norm must be finite where there is noise"),
    (without(noise_multiplier=-0.1), ValueError, "noise_multiplier must be a finite number >= 0, found -0.1"),
    (without(noise_multiplier=float("nan")), ValueError, "noise_multiplier must be a finite number"),
    (without(noise_multiplier="1"), TypeError, "noise_multiplier must be a number >= 0, found '1'"),
    (without("noise_multiplier"), ValueError, "exactly one of noise_multiplier and target_epsilon, found neither"),
    (
        without(target_epsilon=3, target_delta=1e-5, epochs=1),
        ValueError,
        "exactly one of noise_multiplier and target_epsilon, found both",
    ),
    (without("noise_multiplier", target_epsilon=3, epochs=1), ValueError, "target_epsilon needs target_delta"),
    (without("noise_multiplier", target_epsilon=3, target_delta=1e-5), ValueError, "target_epsilon needs epochs"),
    (without("noise_multiplier", target_epsilon=0, target_delta=1e-5, epochs=1), ValueError, "target_epsilon"),
    (without(max_epsilon=3), ValueError, "max_epsilon needs target_delta"),
    (without(max_epsilon=-3, target_delta=1e-5), ValueError, "max_epsilon must be greater than 0"),
    (without(target_delta=0), ValueError, r"target_delta must be in \(0, 1\), found 0"),
    (without(target_delta=1.0), ValueError, r"target_delta must be in \(0, 1\), found 1.0"),
    (without(target_delta="x"), TypeError, "target_delta must be a number"),
    (without("batch_size"), TypeError, "batch_size"),
    (without(batch_size=0), ValueError, "batch_size must be greater than 0, found 0"),
    (without(batch_size=-8), ValueError, "batch_size must be greater than 0, found -8"),
    (without(batch_size=None), TypeError, "batch_size must be a positive number, found None"),
    (without(batch_size=float("inf")), ValueError, "batch_size must be finite"),
    (without(epochs=0), ValueError, "epochs must be greater than 0"),
    (without(dataset_size=0), ValueError, "dataset_size must be greater than 0"),
    (without(dataset_size=10.5), TypeError, "dataset_size must be an integer"),
    (without(dataset_size=4), ValueError, "batch_size=8 is larger than the data set's 4 rows"),
    (without(sampling="random"), ValueError, "sampling must be one of"),
    (without(clipping="norm"), ValueError, "clipping must be one of"),
    (without(loss_reduction="none"), ValueError, "loss_reduction must be one of"),
    (without(accountant="gdp"), ValueError, "accountant"),
    (without(secure=False), ValueError, "secure=False is only for tests"),
    (without(generator=3), TypeError, "generator must be a paddle_privacy.NoiseGenerator"),
    (without(generator=pp.NoiseGenerator.seeded(1)), ValueError, "generator is seeded"),
    (
        without(grad_clip=nn.ClipGradByGlobalNorm(1.0)),
        ValueError,
        "grad_clip clips the batch's gradient after the noise",
    ),
    (without(noise_multiplyer=1.0), TypeError, "noise_multiplyer"),
    (without(data_loader=[1, 2]), TypeError, "data_loader must be a paddle.io.DataLoader"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_refused_and_nothing_changed(arguments, error, message):
    net = nn.Linear(3, 2)
    with pytest.raises(error, match=message):
        pp.DPSGD(parameters=net.parameters(), **arguments)
    assert not net._forward_pre_hooks and not net._forward_post_hooks
    assert all(not p.stop_gradient and p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        (None, ValueError, "parameters is missing"),
        ([], ValueError, "parameters is empty"),
        ({"params": []}, TypeError, "parameters must be a list"),
    ],
)
def test_refused_parameters(parameters, error, message):
    with pytest.raises(error, match=message):
        pp.DPSGD(parameters=parameters, **GOOD)


def test_a_parameter_of_no_layer_is_refused_by_name():
    lonely = paddle.create_parameter([3], "float32", name="lonely")
    net = nn.Linear(3, 2)
    with pytest.raises(pp.PrivacyError, match=r"parameters \['lonely'\] belong to no layer"):
        pp.DPSGD(parameters=[*net.parameters(), lonely], **GOOD)
    assert not net._forward_pre_hooks


def test_lbfgs_and_things_that_are_no_optimizer_are_refused():
    with pytest.raises(TypeError, match="LBFGS evaluates the loss several times"):
        pp.dp_optimizer(paddle.optimizer.LBFGS)
    with pytest.raises(TypeError, match=r"must be a paddle.optimizer.Optimizer class"):
        pp.dp_optimizer(nn.Linear)


def test_it_is_a_paddle_optimizer_with_a_readable_signature():
    net = nn.Linear(3, 2)
    optimizer = pp.DPAdamW(parameters=net, **GOOD)
    assert isinstance(optimizer, paddle.optimizer.AdamW)
    names = inspect.signature(pp.DPAdamW).parameters
    assert {"learning_rate", "beta1", "weight_decay", "clip_norm", "noise_multiplier", "ledger"} <= set(names)
    assert "grad_clip" not in names and "kwargs" not in names


def test_other_ways_to_update_are_private_or_refused():
    net = nn.Linear(3, 2)
    optimizer = pp.DPSGD(parameters=net.parameters(), sampling="none", **GOOD)
    loss = net(paddle.ones([8, 3])).mean()
    loss.backward()
    before = net.weight.numpy()
    with pytest.raises(pp.PrivacyError, match="past the clipping"):
        optimizer.backward(loss)
    with pytest.raises(pp.PrivacyError, match="neither clipped nor noised"):
        optimizer.apply_gradients([])
    with pytest.raises(ValueError, match="takes only the loss"):
        optimizer.minimize(loss, parameters=net.parameters())
    np.testing.assert_array_equal(net.weight.numpy(), before)
    optimizer.minimize(loss)
    assert not np.array_equal(net.weight.numpy(), before)
    assert optimizer.get_privacy_spent(1e-5).epsilon > 0
