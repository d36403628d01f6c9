"""The oracle of the gradient tests: one-by-one autograd, with nothing of the library in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import paddle
from paddle import Tensor, nn


def slice_rows(inputs: Sequence, rows: slice) -> list:
    return [x[rows] if isinstance(x, Tensor) else x for x in inputs]


def one_by_one(model: nn.Layer, loss_fn: Callable, inputs: Sequence, parameters: Sequence[Tensor]) -> list[np.ndarray]:
    """Per-sample gradients [B, *shape] of ``loss_fn(model, *inputs) -> [B]``, by B separate backward passes."""
    batch = next(x.shape[0] for x in inputs if isinstance(x, Tensor))
    collected: list[list[np.ndarray]] = [[] for _ in parameters]
    for i in range(batch):
        loss = loss_fn(model, *slice_rows(inputs, slice(i, i + 1))).sum()
        grads = paddle.grad([loss], list(parameters), allow_unused=True)
        for store, grad, parameter in zip(collected, grads, parameters):
            store.append(np.zeros(parameter.shape, "float64") if grad is None else grad.numpy().astype("float64"))
    return [np.stack(rows) for rows in collected]


def clipped_sum(per_sample: list[np.ndarray], clip_norm: float) -> list[np.ndarray]:
    """Σᵢ min(1, C/‖gᵢ‖) gᵢ, flat over all parameters."""
    squared = sum((g.reshape(len(g), -1) ** 2).sum(axis=1) for g in per_sample)
    factors = np.minimum(1.0, clip_norm / np.maximum(np.sqrt(squared), 1e-300))
    return [np.tensordot(factors, g, axes=1) for g in per_sample]
