"""With no noise and no clipping a private step is Paddle's own step; with clipping it is the textbook sum."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from oracle import clipped_sum, one_by_one
from paddle import nn

import paddle_privacy as pp


def model(dtype: str = "float64") -> nn.Layer:
    paddle.seed(3)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    return net.to(dtype=dtype)


def batch(rows: int = 8, dtype: str = "float64", seed: int = 0):
    rng = np.random.default_rng(seed)
    return paddle.to_tensor(rng.normal(size=(rows, 6)).astype(dtype)), paddle.to_tensor(rng.integers(0, 3, rows))


def train(net: nn.Layer, optimizer, steps: int, reduction: str, schedule=None) -> list[np.ndarray]:
    for k in range(steps):
        x, y = batch(seed=k, dtype=str(net[0].weight.dtype).split(".")[-1])
        nn.functional.cross_entropy(net(x), y, reduction=reduction).backward()
        optimizer.step()
        optimizer.clear_grad()
        if schedule is not None:
            schedule.step()
    return [p.numpy() for p in net.parameters()]


PAIRS = [
    (pp.DPSGD, paddle.optimizer.SGD, {}),
    (pp.DPSGD, paddle.optimizer.SGD, {"weight_decay": 0.1}),
    (pp.DPMomentum, paddle.optimizer.Momentum, {"momentum": 0.9, "use_nesterov": True}),
    (pp.DPAdam, paddle.optimizer.Adam, {"beta1": 0.8}),
    (pp.DPAdamW, paddle.optimizer.AdamW, {"weight_decay": 0.2}),
    (pp.dp_optimizer(paddle.optimizer.RMSProp), paddle.optimizer.RMSProp, {}),
    (pp.dp_optimizer(paddle.optimizer.Lamb), paddle.optimizer.Lamb, {}),
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("private", "plain", "options"), PAIRS, ids=lambda v: getattr(v, "__name__", ""))
def test_unclipped_and_unnoised_is_paddle(private, plain, options, reduction):
    mine, theirs = model(), model()
    args = {"learning_rate": 0.05, **options}
    ours = private(
        parameters=mine.parameters(),
        clip_norm=float("inf"),
        noise_multiplier=0.0,
        batch_size=8,
        sampling="none",
        loss_reduction=reduction,
        **args,
    )
    reference = plain(parameters=theirs.parameters(), **args)
    for a, b in zip(train(mine, ours, 4, reduction), train(theirs, reference, 4, reduction)):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_parameter_groups_and_a_scheduler():
    def grouped(net):
        return [
            {"params": net[0].parameters(), "learning_rate": 0.5, "weight_decay": 0.3},
            {"params": net[2].parameters() + net[3].parameters()},
        ]

    mine, theirs = model(), model()
    schedules = [paddle.optimizer.lr.StepDecay(0.1, step_size=1, gamma=0.5) for _ in range(2)]
    ours = pp.DPSGD(
        learning_rate=schedules[0],
        parameters=grouped(mine),
        clip_norm=float("inf"),
        noise_multiplier=0.0,
        batch_size=8,
        sampling="none",
    )
    reference = paddle.optimizer.SGD(learning_rate=schedules[1], parameters=grouped(theirs))
    for a, b in zip(train(mine, ours, 3, "mean", schedules[0]), train(theirs, reference, 3, "mean", schedules[1])):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_update_is_the_clipped_sum_over_the_public_batch_size(dtype, reduction, rows):
    net = model(dtype)
    x, y = batch(rows, dtype)
    per_sample = one_by_one(
        net, lambda m, x, y: nn.functional.cross_entropy(m(x), y, reduction="none"), [x, y], net.parameters()
    )
    norms = np.sqrt(sum((g.reshape(rows, -1) ** 2).sum(axis=1) for g in per_sample))
    bound = float(np.median(norms))
    expected = clipped_sum(per_sample, bound)
    before = [p.numpy() for p in net.parameters()]
    optimizer = pp.DPSGD(
        learning_rate=1.0,
        parameters=net.parameters(),
        clip_norm=bound,
        noise_multiplier=0.0,
        batch_size=8,
        sampling="none",
        loss_reduction=reduction,
    )
    nn.functional.cross_entropy(net(x), y, reduction=reduction).backward()
    optimizer.step()
    divisor = 8 if reduction == "mean" else 1
    tolerance = {"float64": 1e-12, "float32": 2e-6}[dtype]
    for old, new, want in zip(before, net.parameters(), expected):
        np.testing.assert_allclose((old - new.numpy()) * divisor, want, atol=tolerance, rtol=1e-5)
    np.testing.assert_allclose(optimizer.last_norms.numpy(), norms, rtol=1e-9 if dtype == "float64" else 1e-5)


def test_accumulated_backwards_equal_one_backward_over_their_union():
    parts, whole = model(), model()
    x, y = batch(8)
    for net, pieces in ((parts, [slice(0, 3), slice(3, 4), slice(4, 8)]), (whole, [slice(0, 8)])):
        optimizer = pp.DPSGD(
            learning_rate=1.0,
            parameters=net.parameters(),
            clip_norm=0.3,
            noise_multiplier=0.0,
            batch_size=8,
            sampling="none",
        )
        for piece in pieces:
            nn.functional.cross_entropy(net(x[piece]), y[piece]).backward()
        optimizer.step()
        assert optimizer.accountant.history[0][1] == 1
    for a, b in zip(parts.parameters(), whole.parameters()):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-9, atol=1e-12)


def test_frozen_parameters_stay_and_cost_nothing():
    net = model()
    for p in net[0].parameters():
        p.stop_gradient = True
    before = net[0].weight.numpy()
    optimizer = pp.DPSGD(
        learning_rate=1.0,
        parameters=net.parameters(),
        clip_norm=1.0,
        noise_multiplier=1.0,
        batch_size=8,
        sampling="none",
    )
    x, y = batch()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    np.testing.assert_array_equal(net[0].weight.numpy(), before)
    assert net[0].weight.grad is None


def test_weight_decay_does_not_enter_the_clipped_sum():
    """Weights 1000 times larger than the clip norm: a penalty inside the private sum would be clipped away."""
    net = nn.Linear(4, 2).to(dtype="float64")
    net.weight.set_value(paddle.full([4, 2], 1000.0, dtype="float64"))
    optimizer = pp.DPSGD(
        learning_rate=1.0,
        parameters=[net.weight],
        clip_norm=1e-9,
        noise_multiplier=0.0,
        batch_size=4,
        sampling="none",
        weight_decay=0.01,
    )
    net(paddle.ones([4, 4], dtype="float64")).sum(axis=1).mean().backward()
    optimizer.step()
    np.testing.assert_allclose(net.weight.numpy(), 990.0, rtol=1e-9)


def test_a_non_finite_sample_is_left_out_and_reported():
    net = model()
    x, y = batch(6)
    x[2, 0] = float("nan")
    keep = [0, 1, 3, 4, 5]
    per_sample = one_by_one(
        net,
        lambda m, x, y: nn.functional.cross_entropy(m(x), y, reduction="none"),
        [x[keep], y[keep]],
        net.parameters(),
    )
    expected = clipped_sum(per_sample, 0.5)
    before = [p.numpy() for p in net.parameters()]
    optimizer = pp.DPSGD(
        learning_rate=1.0,
        parameters=net.parameters(),
        clip_norm=0.5,
        noise_multiplier=0.0,
        batch_size=6,
        sampling="none",
        loss_reduction="sum",
    )
    nn.functional.cross_entropy(net(x), y, reduction="sum").backward()
    with pytest.warns(pp.PrivacyWarning, match=r"1 sample\(s\) had a gradient that is not finite"):
        optimizer.step()
    for old, new, want in zip(before, net.parameters(), expected):
        np.testing.assert_allclose(old - new.numpy(), want, atol=1e-12)
