"""Gaussian noise onto sums of clipped gradients, alone or with the optimizer's update in the same pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import paddle

from . import native
from .stream import standard_normals


class Rule(IntEnum):
    """What a pass does with the noisy sum; the numbers are those of ``csrc/step_tensor.h``."""

    ADD_NOISE = 0
    SGD = 1
    MOMENTUM = 2
    NESTEROV = 3
    ADAM = 4


class Noise(NamedTuple):
    """Where in which stream the noise of a pass lies, and its scale; one entry a tensor.

    ``stds``: standard deviations. ``grids``: spacing that noisy values are rounded to, a power of two, or 0.
    ``blocks``: first ChaCha20 block. ``draws``: normals summed for one value, 1 or 4.
    """

    key: np.ndarray
    blocks: Sequence[int]
    stds: Sequence[float]
    grids: Sequence[float]
    draws: int

    def select(self, indices: Sequence[int]) -> Noise:
        """The noise of these tensors only."""
        blocks, stds, grids = ([values[i] for i in indices] for values in (self.blocks, self.stds, self.grids))
        return Noise(self.key, blocks, stds, grids, self.draws)  # type: ignore[arg-type]


class Update(NamedTuple):
    """The tensors and constants of one parameter's update after ``gradient = noisy sum / divisor``.

    ``l2`` is added to the gradient (coupled weight decay), ``decay`` multiplies the parameter first (decoupled).
    ``learning_rate`` and ``epsilon`` of Adam arrive bias-corrected. ``narrow``: the float16 or bfloat16 copy when
    ``parameter`` is its float32 master.
    """

    parameter: paddle.Tensor
    divisor: float
    learning_rate: float
    l2: float = 0.0
    decay: float = 1.0
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    moments: tuple[paddle.Tensor, ...] = ()
    narrow: paddle.Tensor | None = None


def add_noise(sums: Sequence[paddle.Tensor], noise: Noise) -> None:
    """In place ``sum += std * z``, ``z`` from the stream; then rounded to a multiple of the grid unless that is 0."""
    if native.serves(*sums) and all(tensor.is_contiguous() for tensor in sums):
        _run(Rule.ADD_NOISE, [tensor.detach() for tensor in sums], sums, noise, None)
        return
    for tensor, std, grid, block in zip(sums, noise.stds, noise.grids, noise.blocks):
        value = noisy(tensor.detach().numpy(), std, grid, noise.key, block, noise.draws)
        with paddle.no_grad():
            paddle.assign(paddle.to_tensor(value, place=tensor.place), output=tensor.detach())


def noisy(value: np.ndarray, std: float, grid: float, key: np.ndarray, block: int, draws: int) -> np.ndarray:
    """The reference of :func:`add_noise` on one array, in its own precision (float32 or float64)."""
    normals = standard_normals(key, block, value.size, draws).reshape(value.shape).astype(value.dtype)
    real = value.dtype.type
    scale = real(std) if real is np.float64 else float32_not_below(std)
    total = value + normals * scale
    if grid == 0:
        return total
    # Powers of two make both products exact; beyond the limit every float is a multiple of the grid already.
    with np.errstate(over="ignore", invalid="ignore"):
        cells = total * real(1.0 / grid)
        limit = real(2.0**52 if real is np.float64 else 2.0**23)
        return np.where(np.abs(cells) < limit, np.rint(cells) * real(grid), total)


def update_with_noise(rule: Rule, sums: Sequence[paddle.Tensor], noise: Noise, updates: Sequence[Update]) -> None:
    """Noise, division and the parameter update in one native pass; the sums are left as they were.

    Every tensor must be contiguous float32 (``narrow`` aside) on the device of its sum; the caller has asked
    :func:`.native.serves`.
    """
    tensors = [*sums, *(update.parameter for update in updates)]
    moments = {Rule.MOMENTUM: 1, Rule.NESTEROV: 1, Rule.ADAM: 2}.get(rule, 0)
    for index in range(moments):
        tensors += [update.moments[index] for update in updates]
    tensors += [update.narrow for update in updates if update.narrow is not None]
    _run(rule, [tensor.detach() for tensor in tensors], sums, noise, updates)


def _run(
    rule: Rule,
    tensors: list[paddle.Tensor],
    sums: Sequence[paddle.Tensor],
    noise: Noise,
    updates: Sequence[Update] | None,
) -> None:
    spec = np.zeros((len(sums), 9), dtype=np.float64)
    for row, (tensor, std, grid) in enumerate(zip(sums, noise.stds, noise.grids)):
        spec[row, 0] = std if tensor.dtype == paddle.float64 else float32_not_below(std)
        spec[row, 1] = grid
        if updates is not None:
            u = updates[row]
            spec[row, 2:] = u.divisor, u.learning_rate, u.l2, u.decay, u.beta1, u.beta2, u.epsilon
    cpu = paddle.CPUPlace()
    key = paddle.to_tensor(noise.key.view(np.int64), place=cpu)
    blocks = np.asarray(noise.blocks, dtype=np.uint64).view(np.int64).tolist()
    native.call(
        "noise_step", tensors, key, paddle.to_tensor(spec, place=cpu), blocks, int(rule), noise.draws, native.isa()
    )


def float32_not_below(value: float) -> np.float32:
    """The smallest float32 that is at least ``value``: rounding must not shrink the noise."""
    rounded = np.float32(value)
    return rounded if float(rounded) >= value else np.nextafter(rounded, np.float32(np.inf))
