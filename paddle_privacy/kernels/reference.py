"""Norms and weighted sums in Paddle ops: the definition that native code is tested against, and the fallback.

Sums of squares are accumulated in float64. Paddle's own CPU float32 reductions come out too small on long vectors
(0.8% at 10^7 elements), and a norm that is too small clips too little.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle

# Elements of a temporary, so that the reference path stays within memory: 4M doubles are 32 MiB.
_CHUNK_ELEMENTS = 1 << 22


def wide_dtype(x: paddle.Tensor) -> paddle.dtype:
    """What sums over ``x`` are returned in: float64 for float64, float32 for everything narrower."""
    return paddle.float64 if x.dtype == paddle.float64 else paddle.float32


def _kept_rows(c: paddle.Tensor, first: paddle.Tensor, *others: paddle.Tensor) -> list[paddle.Tensor]:
    """The tensors restricted to samples of non-zero weight, then the weights in the dtype of the first tensor."""
    c = c.detach().astype(first.dtype)
    kept = paddle.nonzero(c).reshape([-1])
    if kept.shape[0] == c.shape[0]:
        return [first, *others, c]
    if kept.shape[0] == 0:
        return [tensor[:0] for tensor in (first, *others, c)]
    return [paddle.index_select(tensor, kept, axis=0) for tensor in (first, *others, c)]


def row_squared_norms(x: paddle.Tensor) -> paddle.Tensor:
    """``[B, ...] -> [B]``: squared L2 norm of each row, accumulated in float64."""
    rows = int(x.shape[0])
    with paddle.no_grad():
        total = paddle.zeros([rows], dtype="float64")
        if x.size == 0:
            return total.astype(wide_dtype(x))
        flat = x.detach().reshape([rows, -1])
        width = max(1, _CHUNK_ELEMENTS // rows)
        for start in range(0, flat.shape[1], width):
            part = flat[:, start : start + width].astype("float64")
            total = total + (part * part).sum(axis=1)
        return total.astype(wide_dtype(x))


def weighted_row_sum(x: paddle.Tensor, c: paddle.Tensor) -> paddle.Tensor:
    """``[B, ...], [B] -> [...]``: sum of ``c[i] * x[i]``; a row whose weight is 0 is not read (it may hold NaN)."""
    with paddle.no_grad():
        x, c = _kept_rows(c, x.detach().astype(wide_dtype(x)))
        if x.size == 0:
            return paddle.zeros(x.shape[1:], dtype=x.dtype)
        flat = x.reshape([x.shape[0], -1])
        return paddle.matmul(c.reshape([1, -1]), flat).reshape(x.shape[1:])


def clip_and_sum(
    gradients: Sequence[paddle.Tensor], clip_norms: Sequence[float], flat: bool
) -> tuple[list[paddle.Tensor], paddle.Tensor, paddle.Tensor]:
    """See :func:`.reductions.clip_and_sum`; ``clip_norms`` holds one bound when ``flat``, else one a gradient."""
    with paddle.no_grad():
        squared = paddle.stack([row_squared_norms(g.astype("float64")) for g in gradients])
        if flat:
            squared = squared.sum(axis=0, keepdim=True)
        bounds = paddle.to_tensor(list(clip_norms), dtype="float64", place=squared.place).reshape([-1, 1])
        norms = squared.sqrt()
        finite = paddle.isfinite(squared).all(axis=0, keepdim=True)
        factors = paddle.where(norms > bounds, bounds / norms, paddle.ones_like(norms))
        factors = paddle.where(finite, factors, paddle.zeros_like(factors))
        sums = [weighted_row_sum(g, factors[0 if flat else i]) for i, g in enumerate(gradients)]
        return sums, squared[0] if flat else squared, factors[0] if flat else factors


def norm_layer_sums(
    x: paddle.Tensor, g: paddle.Tensor, epsilon: float, *, centered: bool, with_bias: bool
) -> tuple[paddle.Tensor, paddle.Tensor | None]:
    """See :func:`.reductions.norm_layer_sums`."""
    with paddle.no_grad():
        x, g = x.detach().astype(wide_dtype(x)), g.detach().astype(wide_dtype(x))
        if x.size == 0:
            weight, bias = (paddle.zeros([x.shape[0], x.shape[2]], dtype=x.dtype) for _ in range(2))
            return weight, bias if with_bias else None
        if centered:
            x = x - x.mean(axis=-1, keepdim=True)
        normalised = x * paddle.rsqrt((x * x).mean(axis=-1, keepdim=True) + epsilon)
        return (normalised * g).sum(axis=1), g.sum(axis=1) if with_bias else None


def ghost_squared_norm(a: paddle.Tensor, g: paddle.Tensor) -> paddle.Tensor:
    """``[B, T, d], [B, T, p] -> [B]``: squared Frobenius norm of ``a[i].T @ g[i]``, the gradient of a linear map.

    By whichever is cheaper for this call: ``sum(a a^T * g g^T)`` (the ghost norm of Li et al., "Large language models
    can be strong differentially private learners", 2022) or the gradient itself, a few samples at a time.
    """
    batch, steps, d = (int(n) for n in a.shape)
    p = int(g.shape[2])
    wide = wide_dtype(a)
    with paddle.no_grad():
        if a.size == 0 or g.size == 0:
            return paddle.zeros([batch], dtype=wide)
        a, g = a.detach().astype(wide), g.detach().astype(wide)
        norms = []
        if 2 * steps * steps <= d * p:
            width = max(1, _CHUNK_ELEMENTS // (steps * steps))
            for start in range(0, batch, width):
                left, right = a[start : start + width], g[start : start + width]
                product = paddle.bmm(left, left.transpose([0, 2, 1]))
                product = product * paddle.bmm(right, right.transpose([0, 2, 1]))
                norms.append(product.astype("float64").sum(axis=[1, 2]))
            # A sum of signed terms can round to just below zero; NaN must stay NaN, so no maximum().
            norm = paddle.concat(norms)
            return paddle.where(norm < 0, paddle.zeros_like(norm), norm).astype(wide)
        width = max(1, _CHUNK_ELEMENTS // (d * p))
        for start in range(0, batch, width):
            gradient = paddle.bmm(a[start : start + width].transpose([0, 2, 1]), g[start : start + width])
            norms.append(row_squared_norms(gradient))
        return paddle.concat(norms)


def embedding_squared_norm(ids: paddle.Tensor, g: paddle.Tensor) -> paddle.Tensor:
    """``[B, T] int, [B, T, D] -> [B]``: squared norm of each sample's gradient of an embedding table.

    Rows that share an id within a sample are summed first. Padding rows must be zero already.
    """
    batch, steps = (int(n) for n in ids.shape)
    wide = wide_dtype(g)
    with paddle.no_grad():
        if g.size == 0:
            return paddle.zeros([batch], dtype=wide)
        ids = ids.detach().astype("int64")
        lowest = ids.min()
        span = ids.max() - lowest + 1
        sample = paddle.arange(batch, dtype="int64").reshape([batch, 1])
        pairs = (sample * span + (ids - lowest)).reshape([-1])
        # Sorted by (sample, id), not paddle.unique: its inverse takes quadratic time on CPU.
        order = paddle.argsort(pairs)
        keys = pairs.index_select(order)
        starts = paddle.concat([paddle.ones([1], "bool"), keys[1:] != keys[:-1]])
        segment = paddle.cumsum(starts.astype("int64")) - 1
        first = keys.index_select(paddle.nonzero(starts).reshape([-1]))
        rows = g.detach().astype(wide).reshape([batch * steps, -1]).index_select(order)
        sums = paddle.index_add(paddle.zeros([first.shape[0], rows.shape[1]], dtype=wide), segment, 0, rows)
        norms = row_squared_norms(sums).astype("float64")
        owner = first // span
        return paddle.index_add(paddle.zeros([batch], dtype="float64"), owner, 0, norms).astype(wide)


def embedding_weighted_sum(ids: paddle.Tensor, g: paddle.Tensor, c: paddle.Tensor, num_rows: int) -> paddle.Tensor:
    """``[B, T] int, [B, T, D], [B] -> [num_rows, D]``: sum of ``c[i]`` times each sample's embedding gradient."""
    with paddle.no_grad():
        wide = g.detach().astype(wide_dtype(g))
        total = paddle.zeros([num_rows, wide.shape[2]], dtype=wide.dtype)
        wide, ids, c = _kept_rows(c, wide, ids.detach().astype("int64"))
        if wide.size == 0:
            return total
        if int(ids.min()) < 0 or int(ids.max()) >= num_rows:
            raise ValueError(f"ids must lie in [0, {num_rows}), found {int(ids.min())} to {int(ids.max())}.")
        rows = (wide * c.reshape([-1, 1, 1])).reshape([-1, wide.shape[2]])
        return paddle.index_add(total, ids.reshape([-1]), 0, rows)
