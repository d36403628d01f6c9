"""Captured factors against one-by-one autograd: norms, weighted sums, formed gradients, and selections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_privacy.gradients.capture import Capture
from paddle_privacy.gradients.factors import Factor, merge
from paddle_privacy.gradients.locate import locate
from tests.oracle import one_by_one

RTOL = {"float64": 1e-9, "float32": 1e-5}


def captured(model: nn.Layer, loss_fn: Callable, inputs: Sequence, reduction: str = "sum") -> dict[str, Factor]:
    """The factor of each trained parameter after one forward and backward, as a private optimizer sees it."""
    trained = [p for p in model.parameters() if not p.stop_gradient]
    groups: list = []
    located = locate(trained, model)
    capture = Capture(located, groups.append)
    try:
        losses = loss_fn(model, *inputs)
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        capture.finish()
    finally:
        capture.remove()
    assert len(groups) <= 1, f"{len(groups)} groups from one backward()"
    return {located.names[key]: merge(uses) for group in groups for key, uses in group.factors.items()}


def assert_parity(
    model: nn.Layer,
    loss_fn: Callable,
    inputs: Sequence,
    *,
    dtype: str = "float64",
    reduction: str = "sum",
    rtol: float | None = None,
    oracle_model: nn.Layer | None = None,
) -> dict[str, Factor]:
    """Asserts that every form of every factor equals one-by-one autograd; returns the factors."""
    rtol = RTOL[dtype] if rtol is None else rtol
    names = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    trained = [p for p in model.parameters() if not p.stop_gradient]
    twin = oracle_model or model
    twin_trained = [p for p in twin.parameters() if not p.stop_gradient]
    expected = dict(zip((names[id(p)] for p in trained), one_by_one(twin, loss_fn, inputs, twin_trained)))
    factors = captured(model, loss_fn, inputs, reduction)
    batch = len(next(iter(expected.values())))
    scale = batch if reduction == "mean" else 1
    # Parameters of one model are compared on one scale: a gradient that is zero by symmetry has only rounding in it.
    largest = max(np.abs(g).max() for g in expected.values()) + 1e-30
    weights = np.linspace(0.5, 1.5, batch)
    rows = np.array([batch - 1, 0])
    for name, wanted in expected.items():
        factor = factors.get(name)
        if factor is None:
            assert not np.abs(wanted).max(), f"{name}: no factor, but a gradient"
            continue
        close(factor.per_sample().numpy() * scale, wanted, rtol, largest, f"{name}: gradients")
        flat = wanted.reshape(batch, -1)
        # Squares are compared: where the uses of a parameter cancel, the root magnifies their rounding.
        close(
            factor.squared_norms().numpy().astype("float64") * scale**2,
            (flat**2).sum(axis=1),
            2 * rtol if dtype == "float64" else 4 * rtol,
            largest**2 * flat.shape[1],
            f"{name}: squared norms",
        )
        total = factor.weighted_sum(tensor(weights, dtype)).numpy() * scale
        close(total, np.tensordot(weights, wanted, axes=1), rtol, largest * batch, f"{name}: weighted sum")
        picked = factor.select(paddle.to_tensor(rows))
        close(picked.per_sample().numpy() * scale, wanted[rows], rtol, largest, f"{name}: selected samples")
    return factors


def close(found: np.ndarray, wanted: np.ndarray, rtol: float, scale: float, what: str) -> None:
    assert found.shape == wanted.shape, f"{what}: shape {found.shape}, expected {wanted.shape}"
    worst = np.abs(found - wanted).max() if wanted.size else 0.0
    assert worst <= rtol * scale, f"{what}: off by {worst:.3g} on a scale of {scale:.3g}"


def tensor(values: np.ndarray, dtype: str) -> Tensor:
    return paddle.to_tensor(values, dtype=dtype)


def randomise(model: nn.Layer, seed: int = 0) -> nn.Layer:
    """Every parameter away from its special initial values (ones, zeros), so that nothing cancels by chance."""
    rng = np.random.default_rng(seed)
    for p in model.parameters():
        p.set_value((p.numpy() * 0.5 + 0.3 * rng.standard_normal(p.shape)).astype(p.numpy().dtype))
    return model


def projected_loss(dtype: str = "float64", seed: int = 5) -> Callable:
    """A [B] loss that weighs every output element differently and is not linear in them."""

    def loss_fn(model: nn.Layer, *inputs: Tensor) -> Tensor:
        out = model(*inputs)
        weights = np.random.default_rng(seed).standard_normal([1, *out.shape[1:]])
        return (paddle.tanh(out) * tensor(weights, dtype)).reshape([out.shape[0], -1]).sum(axis=1)

    return loss_fn


def built(build: Callable[[], nn.Layer], dtype: str) -> nn.Layer:
    """The model with its parameters created in `dtype`."""
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        return build()
    finally:
        paddle.set_default_dtype(before)
