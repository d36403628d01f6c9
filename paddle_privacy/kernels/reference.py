"""Every kernel in numpy and Paddle ops: the definition that native code is tested against, and the fallback.

Sums of squares are accumulated in float64. Paddle's own CPU float32 reductions come out too small on long vectors
(0.8% at 10^7 elements), and a norm that is too small clips too little.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle

from .stream import standard_normals


def add_noise(
    tensors: Sequence[paddle.Tensor],
    stds: Sequence[float],
    grids: Sequence[float],
    key: np.ndarray,
    blocks: Sequence[int],
    draws: int,
) -> None:
    """In place ``t += std * z``, ``z`` from the stream at ``blocks[i]``; rounded to multiples of ``grid`` unless 0."""
    with paddle.no_grad():
        for tensor, std, grid, block in zip(tensors, stds, grids, blocks):
            normals = standard_normals(key, block, int(tensor.size), draws).reshape(tensor.shape)
            scale = np.float64(std) if tensor.dtype == paddle.float64 else float32_not_below(std)
            target = tensor.detach()
            noise = normals.astype(scale.dtype) * scale
            target.add_(paddle.to_tensor(noise, dtype=tensor.dtype, place=tensor.place))
            if grid > 0:
                # Powers of two: both products are exact as long as nothing under- or overflows.
                target.scale_(1.0 / grid)
                target.copy_(paddle.round(target) * grid, False)


def float32_not_below(value: float) -> np.float32:
    """The smallest float32 that is at least ``value``: rounding must not shrink the noise."""
    rounded = np.float32(value)
    return rounded if float(rounded) >= value else np.nextafter(rounded, np.float32(np.inf))
