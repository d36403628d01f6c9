"""Norms and weighted sums of per-sample gradients: checks the arguments, then native code or the reference.

Every function returns float32, or float64 for float64 input, and never multiplies a weight of 0 by a value: a sample
that holds NaN or inf can be left out by its weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle

from . import native, reference
from .noise_step import float32_not_below


def row_squared_norms(x: paddle.Tensor) -> paddle.Tensor:
    """``[B, ...] -> [B]``: squared L2 norm of each row, accumulated in float64 whatever the input's dtype."""
    if not _native(x):
        return reference.row_squared_norms(x)
    squared = _squares(x)
    native.call("row_squared_norms", _plain(x), squared)
    return squared.astype(reference.wide_dtype(x))


def weighted_row_sum(x: paddle.Tensor, c: paddle.Tensor) -> paddle.Tensor:
    """``[B, ...], [B] -> [...]``: sum of ``c[i] * x[i]``; a row whose weight is 0 is not read."""
    _check_weights(x, c)
    if not _native(x, c):
        return reference.weighted_row_sum(x, c)
    total = _empty(x.shape[1:], reference.wide_dtype(x), x)
    native.call("weighted_row_sum", _plain(x), _weights(c), total)
    return total


def clip_and_sum(
    gradients: Sequence[paddle.Tensor], clip_norms: float | Sequence[float]
) -> tuple[list[paddle.Tensor], paddle.Tensor, paddle.Tensor]:
    """Clip per-sample gradients and sum them over the samples.

    Args:
        gradients: tensors ``[B, ...]``, all for the same B samples.
        clip_norms: one number C, which bounds each sample's norm over all the tensors (flat clipping), or a list with
            a bound a tensor (per-layer clipping).

    Returns:
        ``(sums, squared_norms, factors)``: the sums without the first axis; squared norms and factors float64 ``[B]``
        (flat) or ``[len(gradients), B]``. A sample that is not finite anywhere has factor 0 and norm NaN or inf. The
        norm of ``factor * gradient`` exceeds C by rounding of float32 at most.
    """
    flat = not isinstance(clip_norms, (list, tuple, np.ndarray))
    bounds = [float(clip_norms)] if flat else [float(c) for c in clip_norms]  # type: ignore[arg-type,union-attr]
    if not gradients:
        raise ValueError("gradients is empty; pass at least one tensor [B, ...].")
    if not flat and len(bounds) != len(gradients):
        raise ValueError(f"clip_norms has {len(bounds)} entries for {len(gradients)} gradients; pass one a tensor.")
    if not all(bound > 0 for bound in bounds):
        raise ValueError(f"clip_norms must be > 0, not {min(bounds)}.")
    batch = int(gradients[0].shape[0])
    for index, gradient in enumerate(gradients):
        if gradient.ndim == 0 or int(gradient.shape[0]) != batch:
            raise ValueError(f"gradients[{index}] has shape {gradient.shape}; expected {batch} samples first.")
    if batch == 0 or not _native(*gradients):
        return reference.clip_and_sum(gradients, bounds, flat)
    shape = [batch] if flat else [len(gradients), batch]
    squared, factors = (_empty(shape, paddle.float64, gradients[0]) for _ in range(2))
    sums = [_empty(g.shape[1:], reference.wide_dtype(g), g) for g in gradients]
    # Attributes are float32: a bound is rounded down, never up.
    rounded = [float(-float32_not_below(-bound)) for bound in bounds]
    native.call("clip_and_sum", [_plain(g) for g in gradients], [squared, factors, *sums], rounded, flat)
    return sums, squared, factors


def ghost_squared_norm(a: paddle.Tensor, g: paddle.Tensor) -> paddle.Tensor:
    """``[B, T, d], [B, T, p] -> [B]``: squared Frobenius norm of ``a[i].T @ g[i]``, the gradient of a linear map.

    By whichever is cheaper for this call: ``sum(a a^T * g g^T)`` (the ghost norm of Li et al., "Large language models
    can be strong differentially private learners", 2022), natively on half of both Gram matrices, or the gradient
    itself, a few samples at a time. The ghost form cancels: its absolute error is some 1e-7 of
    ``(sum_t |a_t| |g_t|)^2``, as is that of the gradient's own float32 sum.
    """
    if a.ndim != 3 or g.ndim != 3 or a.shape[:2] != g.shape[:2]:
        raise ValueError(f"expected a [B, T, d] and g [B, T, p] with equal B and T, not {a.shape} and {g.shape}.")
    batch, steps, d = (int(n) for n in a.shape)
    p = int(g.shape[2])
    # Half of two Gram matrices, T^2 (d + p) / 2, against T d p for the gradient.
    gram = steps * (d + p) <= 2 * d * p
    if a.size == 0 or g.size == 0 or not gram or a.dtype == paddle.float64 or not _native(a, g):
        return reference.ghost_squared_norm(a, g)
    squared = _squares(a)
    native.call("ghost_squared_norm", _plain(a, paddle.float32), _plain(g, paddle.float32), squared, native.isa())
    return squared.astype(paddle.float32)


def embedding_squared_norm(ids: paddle.Tensor, g: paddle.Tensor) -> paddle.Tensor:
    """``[B, T] int, [B, T, D] -> [B]``: squared norm of each sample's gradient of an embedding table.

    Positions that share an id within a sample are summed first. Padding rows must be zero already.
    """
    _check_ids(ids, g)
    if g.size == 0 or g.dtype == paddle.float64 or not _native(ids, g):
        return reference.embedding_squared_norm(ids, g)
    squared = _squares(g)
    native.call("embedding_squared_norm", _plain(ids, paddle.int64), _plain(g, paddle.float32), squared)
    return squared.astype(paddle.float32)


def embedding_weighted_sum(ids: paddle.Tensor, g: paddle.Tensor, c: paddle.Tensor, num_rows: int) -> paddle.Tensor:
    """``[B, T] int, [B, T, D], [B] -> [num_rows, D]``: sum of ``c[i]`` times each sample's embedding gradient."""
    _check_ids(ids, g)
    _check_weights(g, c)
    if ids.size > 0 and (int(ids.min()) < 0 or int(ids.max()) >= num_rows):
        raise ValueError(f"ids must lie in [0, {num_rows}), found {int(ids.min())} to {int(ids.max())}.")
    if g.size == 0 or g.dtype == paddle.float64 or not _native(ids, g, c):
        return reference.embedding_weighted_sum(ids, g, c, num_rows)
    table = _empty([num_rows, int(g.shape[2])], paddle.float32, g).zero_()
    native.call("embedding_weighted_sum", _plain(ids, paddle.int64), _plain(g, paddle.float32), _weights(c), table)
    return table


def norm_layer_sums(
    x: paddle.Tensor, g: paddle.Tensor, epsilon: float, *, centered: bool, with_bias: bool
) -> tuple[paddle.Tensor, paddle.Tensor | None]:
    """Per-sample gradients of a normalisation layer over the last axis.

    Args:
        x: the layer's input ``[B, T, D]``. g: the gradient of its output ``[B, T, D]``.
        epsilon: added to the variance. centered: LayerNorm (subtract the mean) or RMSNorm.

    Returns:
        ``(weight [B, D], bias [B, D] or None)``: sums over T of ``normalised(x) * g`` and of ``g``.
    """
    if x.ndim != 3 or x.shape != g.shape:
        raise ValueError(f"expected x and g [B, T, D] of one shape, not {x.shape} and {g.shape}.")
    if x.size == 0 or x.dtype == paddle.float64 or not _native(x, g):
        return reference.norm_layer_sums(x, g, epsilon, centered=centered, with_bias=with_bias)
    sums = [_empty([x.shape[0], x.shape[2]], paddle.float32, x) for _ in range(1 + with_bias)]
    native.call("norm_layer_sums", _plain(x, paddle.float32), _plain(g, paddle.float32), sums, float(epsilon), centered)
    return sums[0], sums[1] if with_bias else None


def _native(*tensors: paddle.Tensor) -> bool:
    return all(tensor.size > 0 for tensor in tensors) and native.serves(*tensors)


def _plain(x: paddle.Tensor, dtype: paddle.dtype | None = None) -> paddle.Tensor:
    x = x.detach()
    return (x if dtype is None else x.astype(dtype)).contiguous()


def _weights(c: paddle.Tensor) -> paddle.Tensor:
    return _plain(c, paddle.float64)


def _empty(shape: Sequence[int], dtype: paddle.dtype, like: paddle.Tensor) -> paddle.Tensor:
    fresh = paddle.empty(list(shape), dtype=dtype)
    return fresh if fresh.place == like.place else fresh._copy_to(like.place, True)


def _squares(x: paddle.Tensor) -> paddle.Tensor:
    return _empty([x.shape[0]], paddle.float64, x)


def _check_weights(x: paddle.Tensor, c: paddle.Tensor) -> None:
    if c.ndim != 1 or x.ndim == 0 or int(c.shape[0]) != int(x.shape[0]):
        raise ValueError(f"expected one weight a sample: weights have shape {c.shape}, samples {x.shape}.")


def _check_ids(ids: paddle.Tensor, g: paddle.Tensor) -> None:
    if ids.ndim != 2 or g.ndim != 3 or ids.shape != g.shape[:2]:
        raise ValueError(f"expected ids [B, T] and g [B, T, D] with equal B and T, not {ids.shape} and {g.shape}.")
