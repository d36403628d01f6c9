"""Σᵢ cᵢgᵢ: the sum of clipped per-sample gradients of one logical batch."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor

from paddle_privacy.clipping import Clipping
from paddle_privacy.gradients.capture import Group
from paddle_privacy.gradients.factors import Factor, accumulation_dtype, merge


class ClippedSum:
    """Adds groups of samples until a step takes the sum.

    Args:
        parameters: the managed parameters.
        layer_paths: for each, the path of the layer that owns it (what per-layer clipping goes by).
        clipping: norms to factors.
    """

    def __init__(self, parameters: Sequence[Tensor], layer_paths: Sequence[str], clipping: Clipping):
        self.parameters, self.clipping = list(parameters), clipping
        self._blocks = dict(zip(map(id, parameters), clipping.blocks(layer_paths)))
        self._count = max(self._blocks.values(), default=0) + 1
        self.clear()

    def clear(self) -> None:
        """Forgets everything that was added."""
        self._sums: dict[int, Tensor] = {}
        self._norms: list[Tensor] = []
        self._clipped: list[Tensor] = []
        self._sensitivity = 0.0
        self.non_finite = 0

    def add(self, group: Group, scale: float) -> None:
        """Clips and adds the samples of `group`.

        Args:
            group: factors of each parameter; consumed.
            scale: what turns the recorded gradients into per-sample ones (the number of rows under a mean loss).

        A sample whose gradient is not finite is left out by selection (0 · inf is not 0) and counted.
        """
        if not group.batch:
            return
        total = group.taken_squares
        if group.factors:
            factors = {key: merge(uses) for key, uses in group.factors.items()}
            group.factors.clear()
            squared = self._squared_norms(list(factors.items()), group.batch) * scale**2
            total = [*total, squared.sum(axis=0)]
            self._add(factors, squared, scale)
        if total:
            whole = sum(total[1:], total[0])
            finite = paddle.nonzero(paddle.isfinite(whole)).reshape([-1])
            self.non_finite += group.batch - finite.shape[0]
            self._norms.append(whole.index_select(finite).sqrt())

    def add_layer(self, group: Group, keys: list[int], scale: float) -> None:
        """Clips and adds what the samples of `group` do to one block, before the rest of their gradients is known.

        Only where each layer is a block of its own. A sample whose part is not finite is left out of this block.
        """
        blocks = {self._blocks[key] for key in keys}
        members = {id(p) for p in self.parameters if self._blocks[id(p)] in blocks and not p.stop_gradient}
        if len(blocks) != 1 or not members <= set(keys) or not group.batch:
            return
        factors = {key: merge(group.factors.pop(key)) for key in keys}
        group.taken.update(keys)
        squared = self._squared_norms(list(factors.items()), group.batch) * scale**2
        group.taken_squares.append(squared.sum(axis=0))
        self._add(factors, squared, scale)

    def _add(self, factors: dict[int, Factor], squared: Tensor, scale: float) -> None:
        """Adds the samples whose squared norms [blocks, B] are finite; consumes `factors`."""
        finite = paddle.isfinite(squared).all(axis=0)
        if not bool(finite.all()):
            rows = paddle.nonzero(finite).reshape([-1])
            if rows.shape[0] == 0:
                return
            for key in factors:
                factors[key] = factors[key].select(rows)
            squared = squared.index_select(rows, axis=1)
        weights = self.clipping.factors(squared)
        self._sensitivity = max(self._sensitivity, self.clipping.sensitivity)
        self._clipped.append((weights < 1.0).any(axis=0))
        for key in list(factors):
            # Popped one by one: each factor's activations are freed before the next sum is made.
            part = factors.pop(key).weighted_sum(weights[self._blocks[key]] * scale)
            held = self._sums.get(key)
            self._sums[key] = part if held is None else held.add_(part)

    def _squared_norms(self, factors: list, batch: int) -> Tensor:
        by_block: list[list[Tensor]] = [[] for _ in range(self._count)]
        for key, factor in factors:
            by_block[self._blocks[key]].append(factor.squared_norms())
        if self._count == 1:
            return paddle.stack(by_block[0]).sum(axis=0, keepdim=True)
        dtype = next(norms[0].dtype for norms in by_block if norms)
        zeros = paddle.zeros([batch], dtype=dtype)
        return paddle.stack([sum(norms[1:], norms[0]) if norms else zeros for norms in by_block])

    def take(self) -> list[Tensor]:
        """The sum for each parameter, zeros where no sample reached it; float32, or float64 for float64 parameters."""
        return [
            self._sums[id(p)].astype(accumulation_dtype(p))
            if id(p) in self._sums
            else paddle.zeros(p.shape, dtype=accumulation_dtype(p))
            for p in self.parameters
        ]

    @property
    def sensitivity(self) -> float:
        """What one sample can have added, by the bound that was in force when it was clipped."""
        return self._sensitivity or self.clipping.sensitivity

    @property
    def norms(self) -> Tensor:
        """[rows]: the norms of the samples added so far, before clipping. Private data: not to be published."""
        return paddle.concat(self._norms) if self._norms else paddle.zeros([0])

    @property
    def clip_fraction(self) -> float:
        """The share of samples that were clipped. Private data as well."""
        return float(paddle.concat(self._clipped).astype("float32").mean()) if self._clipped else 0.0
