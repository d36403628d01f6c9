"""Per-sample gradients of one parameter, kept in the form in which they are cheapest.

A layer rule says *what* the gradient of sample i is, as a factor; this file says how to get from a factor to
the three things a private step needs, without forming ``[B, *shape]`` unless that is the cheapest way:

- ``squared_norms()``: ‖Gᵢ‖², the *ghost norm* (Goodfellow 2015; Li et al. 2022, "Large Language Models Can Be
  Strong Differentially Private Learners"; Bu et al. 2022 for convolutions);
- ``weighted_sum(c)``: Σᵢ cᵢGᵢ, the *book-keeping* assembly from the same activations and output gradients
  (Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost");
- ``per_sample()``: the gradients themselves.

All results are float32, or float64 where the layer computes in float64. A parameter used several times has
several factors; :func:`merge` joins them so that the cross terms ⟨Gᵢ, G'ᵢ⟩ are part of the norm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import paddle
from paddle import Tensor

from paddle_privacy import kernels

# Columns of an unfolded map that are made at a time: 2 MiB of float32.
_CHUNK_ELEMENTS = 1 << 19

# Rows below which a product runs transposed.
_NARROW = 32


def accumulation_dtype(x: Tensor) -> paddle.dtype:
    """float64 stays, everything narrower is summed in float32."""
    return paddle.float64 if x.dtype == paddle.float64 else paddle.float32


def widen(x: Tensor) -> Tensor:
    """`x` in the dtype in which norms and sums are taken; no copy where it already is."""
    dtype = accumulation_dtype(x)
    return x if x.dtype == dtype else x.astype(dtype)


class Factor(ABC):
    """The gradients of B samples with respect to one parameter of shape `shape`."""

    batch: int
    shape: tuple[int, ...]

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """‖Gᵢ‖², shape [B]."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σᵢ cᵢGᵢ for finite gradients and weights c of shape [B]; shape `shape`."""

    @abstractmethod
    def per_sample(self) -> Tensor:
        """Gᵢ, shape [B, *shape]."""

    @abstractmethod
    def select(self, rows: Tensor) -> Factor:
        """The same factor for some of the samples; `rows` is an index tensor.

        This is how a sample that is not finite leaves the sum: 0 · inf would not be 0.
        """

    def inner(self, other: Factor) -> Tensor:
        """⟨Gᵢ, G'ᵢ⟩ with another factor of the same parameter, shape [B]."""
        mine, theirs = self.per_sample(), other.per_sample()
        return (mine * theirs).reshape([self.batch, -1]).sum(axis=1)


class Dense(Factor):
    """Gradients already formed, [B, *shape]: biases, norm scales, small convolutions."""

    def __init__(self, gradients: Tensor):
        self.gradients = widen(gradients)
        self.batch = gradients.shape[0]
        self.shape = tuple(gradients.shape[1:])

    def squared_norms(self) -> Tensor:
        return kernels.row_squared_norms(self.gradients)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return kernels.weighted_row_sum(self.gradients, weights)

    def per_sample(self) -> Tensor:
        return self.gradients

    def select(self, rows: Tensor) -> Dense:
        return Dense(self.gradients.index_select(rows))


class Outer(Factor):
    """Sums of outer products over positions: Gᵢ = Σₜ aᵢₜ gᵢₜᵀ, from a [B, T, d] and g [B, T, p].

    Linear layers, recurrent layers, matrix products. With `groups` of size k along the second axis
    (a [B, k, T, d], g [B, k, T, p]) the gradient is block-wise, [k, d, p]. The parameter's own layout is
    `layout(G)`, a pure reshape or transpose of [d, p] or [k, d, p], so norms do not depend on it.
    """

    def __init__(self, a: Tensor, g: Tensor, *, transposed: bool = False, shape: Sequence[int] | None = None):
        if a.ndim == 3:
            a, g = a.unsqueeze(1), g.unsqueeze(1)
        self.a, self.g = a, g
        self.batch, self.groups, self.positions, self.rows = a.shape
        self.cols = g.shape[-1]
        self.transposed = transposed
        if shape is None:
            shape = (self.cols, self.rows) if transposed else (self.rows, self.cols)
        self.shape = tuple(shape)

    def squared_norms(self) -> Tensor:
        """Σₜₛ⟨aₜ,aₛ⟩⟨gₜ,gₛ⟩ where 2T² ≤ d·p, else ‖Σₜ aₜgₜᵀ‖²: the kernel takes the cheaper for this very batch."""
        merged = [self.batch * self.groups, self.positions]
        a = widen(self.a).reshape([*merged, self.rows])
        g = widen(self.g).reshape([*merged, self.cols])
        norms = kernels.ghost_squared_norm(a, g)
        return norms.reshape([self.batch, self.groups]).sum(axis=1) if self.groups > 1 else norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        a, g = widen(self.a), widen(self.g)
        g = g * weights.astype(g.dtype).reshape([-1, 1, 1, 1])
        if self.groups == 1:
            flat = [self.batch * self.positions, -1]
            left, right = a.reshape(flat), g.reshape(flat)
        else:
            by_group = [self.groups, self.batch * self.positions, -1]
            left, right = (x.transpose([1, 0, 2, 3]).reshape(by_group) for x in (a, g))
        return self._product(left, right, batch=[])

    def per_sample(self) -> Tensor:
        a, g = widen(self.a), widen(self.g)
        if self.groups == 1:
            a, g = a.squeeze(1), g.squeeze(1)
        return self._product(a, g, batch=[self.batch])

    def _product(self, left: Tensor, right: Tensor, batch: list[int]) -> Tensor:
        if self.transposed:
            left, right = right, left
        return paddle.matmul(left, right, transpose_x=True).reshape([*batch, *self.shape])

    def select(self, rows: Tensor) -> Outer:
        picked = (x.index_select(rows) for x in (self.a, self.g))
        return Outer(*picked, transposed=self.transposed, shape=self.shape)


class Use(NamedTuple):
    """What one use of an :class:`Unfolded` parameter left behind.

    `rows` is [B, groups · k, T]; `unfold` maps `source`, of any n of its samples, to columns [n, groups · c, T].
    """

    rows: Tensor
    source: Tensor
    unfold: Callable[[Tensor], Tensor]


class Unfolded(Factor):
    """Gᵢ = Σₜ rowsₜ colsₜᵀ within each group, with columns that are larger than what they are made from. Convolutions.

    The columns (patches of a map) exist for a few samples at a time, small enough to stay in the processor's cache.

    Args:
        uses: one for each use of the parameter.
        groups: into how many groups rows and columns are split.
        shape: that of the parameter; the first axis holds the rows of all groups, the others one group's columns.
    """

    def __init__(self, uses: Sequence[Use], groups: int, shape: Sequence[int]):
        self.uses, self.groups, self.shape = list(uses), groups, tuple(shape)
        self.batch = uses[0].rows.shape[0]
        self.rows, self.cols = shape[0] // groups, math.prod(shape[1:])
        self.positions = sum(use.rows.shape[2] for use in uses)

    def squared_norms(self) -> Tensor:
        return self._over_chunks(self._norms_of, [])

    def per_sample(self) -> Tensor:
        return self._over_chunks(self._product, list(self.shape))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = paddle.zeros(self.shape, dtype=accumulation_dtype(self.uses[0].rows))
        for some, rows, cols in self._chunks():
            if self.rows <= self.positions:
                part = kernels.weighted_row_sum(self._product(rows, cols), weights[some])
            else:
                # A sample's gradient is larger than its columns: the samples are summed within one product.
                rows = rows * weights[some].astype(rows.dtype).reshape([-1] + [1] * (rows.ndim - 1))
                part = self._product(*(x.moveaxis(0, -2).flatten(-2) for x in (rows, cols)))
            total.add_(part.reshape(self.shape))
        return total

    def select(self, rows: Tensor) -> Unfolded:
        picked = [Use(use.rows.index_select(rows), use.source.index_select(rows), use.unfold) for use in self.uses]
        return Unfolded(picked, self.groups, self.shape)

    def formed_or_lazy(self) -> Factor:
        """The gradients themselves where they take no more than twice what would have to be kept for them instead.

        The columns are then made once; later, once for the norms and once for the sum.
        """
        kept = sum(math.prod(x.shape[1:]) for use in self.uses for x in (use.rows, use.source))
        return Dense(self.per_sample()) if math.prod(self.shape) <= 2 * kept else self

    def _chunks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Samples, with their rows [n, k, T] and columns [n, c, T] over the positions of all uses.

        With more than one group, [n, groups, k, T] and [n, groups, c, T].
        """
        size = max(1, _CHUNK_ELEMENTS // max(1, self.groups * self.cols * self.positions))
        for start in range(0, self.batch if self.positions else 0, size):
            some = slice(start, min(start + size, self.batch))
            made = [(widen(use.rows[some]), use.unfold(use.source[some])) for use in self.uses]
            rows, cols = (parts[0] if len(parts) == 1 else paddle.concat(parts, axis=2) for parts in zip(*made))
            if self.groups > 1:
                split = [some.stop - start, self.groups, -1, self.positions]
                rows, cols = rows.reshape(split), cols.reshape(split)
            yield some, rows, cols

    def _over_chunks(self, of: Callable[[Tensor, Tensor], Tensor], shape: list[int]) -> Tensor:
        parts = [of(rows, cols) for _, rows, cols in self._chunks()]
        if not parts:
            return paddle.zeros([self.batch, *shape], dtype=accumulation_dtype(self.uses[0].rows))
        return (parts[0] if len(parts) == 1 else paddle.concat(parts)).reshape([self.batch, *shape])

    def _product(self, rows: Tensor, cols: Tensor) -> Tensor:
        """rows · colsᵀ; as the transpose of cols · rowsᵀ where rows are few, which the CPU is faster at."""
        if min(self.cols, _NARROW) <= self.rows:
            return paddle.matmul(rows, cols, transpose_y=True)
        return paddle.matmul(cols, rows, transpose_y=True).mT

    def _norms_of(self, rows: Tensor, cols: Tensor) -> Tensor:
        if self.positions * (self.rows + self.cols) > self.rows * self.cols:
            return kernels.row_squared_norms(self._product(rows, cols))
        # Few positions and a large kernel: Gram matrices are smaller than gradients.
        norms = kernels.ghost_squared_norm(*(x.reshape([-1, *x.shape[-2:]]).mT for x in (cols, rows)))
        return norms.reshape([rows.shape[0], -1]).sum(axis=1)


class Rows(Factor):
    """Sparse rows: Gᵢ = Σₜ e(idᵢₜ) gᵢₜᵀ, from ids [B, T] and g [B, T, D]; shape [V, D]. Embeddings.

    Never forms a one-hot matrix nor [B, V, D].
    """

    def __init__(self, ids: Tensor, g: Tensor, num_rows: int):
        self.ids, self.g, self.num_rows = ids, widen(g), num_rows
        self.batch = g.shape[0]
        self.shape = (num_rows, g.shape[-1])

    def squared_norms(self) -> Tensor:
        return kernels.embedding_squared_norm(self.ids, self.g)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return kernels.embedding_weighted_sum(self.ids, self.g, weights, self.num_rows)

    def per_sample(self) -> Tensor:
        one_by_one = [
            kernels.embedding_weighted_sum(
                self.ids[i : i + 1], self.g[i : i + 1], paddle.ones([1], self.g.dtype), self.num_rows
            )
            for i in range(self.batch)
        ]
        return paddle.stack(one_by_one) if one_by_one else paddle.zeros([0, *self.shape], self.g.dtype)

    def inner(self, other: Factor) -> Tensor:
        """Against an :class:`Outer` on the same table (a tied output head), without forming either gradient:
        ⟨E, O⟩ = Σₜₛ a[s, idₜ]⟨hₛ, gₜ⟩, where O = Σₛ aₛhₛᵀ has one row a table row."""
        if not isinstance(other, Outer) or other.groups > 1 or other.shape != self.shape:
            return super().inner(other)
        by_row, by_col = (other.g, other.a) if other.transposed else (other.a, other.g)
        by_row, by_col = widen(by_row).squeeze(1), widen(by_col).squeeze(1)
        ids = self.ids.unsqueeze(1).expand([self.batch, other.positions, self.ids.shape[1]])
        picked = paddle.take_along_axis(by_row, ids.astype("int64"), axis=2, broadcast=False)
        return (picked * paddle.matmul(by_col, self.g, transpose_y=True)).sum(axis=[1, 2])

    def select(self, rows: Tensor) -> Rows:
        return Rows(self.ids.index_select(rows), self.g.index_select(rows), self.num_rows)


class Sum(Factor):
    """The sum of factors of different kinds on one parameter (a tied embedding and output head)."""

    def __init__(self, parts: Sequence[Factor]):
        self.parts = list(parts)
        self.batch, self.shape = parts[0].batch, parts[0].shape

    def squared_norms(self) -> Tensor:
        total = sum((part.squared_norms() for part in self.parts[1:]), self.parts[0].squared_norms())
        for k, left in enumerate(self.parts):
            for right in self.parts[k + 1 :]:
                rows_first = (left, right) if isinstance(left, Rows) else (right, left)
                total = total + 2.0 * rows_first[0].inner(rows_first[1])
        # Rounding may leave a cancelling sum a hair below zero.
        return total.clip(min=0.0)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return sum((part.weighted_sum(weights) for part in self.parts[1:]), self.parts[0].weighted_sum(weights))

    def per_sample(self) -> Tensor:
        return sum((part.per_sample() for part in self.parts[1:]), self.parts[0].per_sample())

    def select(self, rows: Tensor) -> Sum:
        return Sum([part.select(rows) for part in self.parts])


def merge(factors: Sequence[Factor]) -> Factor:
    """One factor for all the uses of a parameter in a backward pass.

    Equal kinds are concatenated along the positions (which carries every cross term), formed gradients are
    added, and what is left is a :class:`Sum`.
    """
    if len(factors) == 1:
        return factors[0]
    dense = [f for f in factors if isinstance(f, Dense)]
    rows = [f for f in factors if isinstance(f, Rows)]
    unfolded = [f for f in factors if isinstance(f, Unfolded)]
    outers: dict[tuple, list[Outer]] = {}
    for f in factors:
        if isinstance(f, Outer):
            outers.setdefault((f.groups, f.rows, f.cols, f.transposed, f.shape), []).append(f)
    parts: list[Factor] = [f for f in factors if isinstance(f, Sum)]
    if dense:
        parts.append(Dense(sum((f.gradients for f in dense[1:]), dense[0].gradients)))
    if rows:
        parts.append(
            rows[0]
            if len(rows) == 1
            else Rows(
                paddle.concat([f.ids.astype("int64") for f in rows], axis=1),
                paddle.concat([f.g for f in rows], axis=1),
                rows[0].num_rows,
            )
        )
    for groups in {f.groups for f in unfolded}:
        uses = [use for f in unfolded if f.groups == groups for use in f.uses]
        parts.append(Unfolded(uses, groups, unfolded[0].shape))
    for same in outers.values():
        if len(same) == 1:
            parts.append(same[0])
            continue
        a = paddle.concat([widen(f.a) for f in same], axis=2)
        g = paddle.concat([widen(f.g) for f in same], axis=2)
        parts.append(Outer(a, g, transposed=same[0].transposed, shape=same[0].shape))
    return parts[0] if len(parts) == 1 else Sum(parts)
