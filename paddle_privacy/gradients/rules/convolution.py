"""Convolutions as matrix products over unfolded patches, group by group."""

from __future__ import annotations

import itertools
import math

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_privacy.gradients.factors import Dense, Factor, Outer, formed_or_lazy, widen
from paddle_privacy.gradients.rules.registry import Lazy, register_grad_rule

Pads = list[tuple[int, int]]


def _same_padding(sizes: list[int], kernel: list[int], stride: list[int]) -> Pads:
    """Paddle's "SAME": output ⌈size/stride⌉, the odd cell behind; dilation counts as 1."""
    needed = [max((math.ceil(n / s) - 1) * s + k - n, 0) for n, k, s in zip(sizes, kernel, stride)]
    return [(n // 2, n - n // 2) for n in needed]


def explicit_padding(layer: nn.Layer, sizes: list[int]) -> tuple[Pads, list[int]]:
    """(before, after) for each spatial axis, and the dilation, as the layer's forward applies them."""
    from paddle.nn.functional.conv import _update_padding_nd

    dims = len(sizes)
    padding = 0 if layer._padding_mode != "zeros" else layer._padding
    if dims == 1 and isinstance(padding, (list, tuple)) and len(padding) == 3:
        padding = padding[2 if layer._channel_dim == 1 else 1]  # conv1d takes [[0, 0], [0, 0], [before, after]]
    updated, algorithm = _update_padding_nd(padding, layer._channel_dim != 1, dims)
    if algorithm == "SAME":
        return _same_padding(sizes, layer._kernel_size, layer._stride), [1] * dims
    pairs = [(updated[2 * i], updated[2 * i + 1]) for i in range(dims)] if len(updated) == 2 * dims else None
    return pairs or [(p, p) for p in updated], list(layer._dilation)


def padded_input(layer: nn.Layer, x: Tensor) -> tuple[Tensor, list[int]]:
    """The input channels-first with every pad applied as values, and the dilation."""
    if layer._padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer._padding_mode, data_format=layer._data_format)
    if layer._channel_dim != 1:
        x = x.transpose([0, x.ndim - 1, *range(1, x.ndim - 1)])
    pads, dilation = explicit_padding(layer, list(x.shape[2:]))
    if any(before or after for before, after in pads):
        # Spelt over every axis: the short forms of F.pad differ between ranks.
        x = F.pad(x, [0, 0, 0, 0, *itertools.chain(*pads)], pad_from_left_axis=True)
    return x, dilation


def patches(x: Tensor, kernel: list[int], stride: list[int], dilation: list[int], out: list[int]) -> Tensor:
    """[B, C, *sizes] -> [B, C·∏kernel, ∏out]; the cell of each patch in row-major order, as in the weight."""
    batch, channels = x.shape[:2]
    if len(kernel) == 2:
        return F.unfold(x, kernel, stride, 0, dilation)
    cells = []
    for offsets in itertools.product(*(range(k) for k in kernel)):
        starts = [o * d for o, d in zip(offsets, dilation)]
        ends = [b + (n - 1) * s + 1 for b, n, s in zip(starts, out, stride)]
        cells.append(paddle.strided_slice(x, list(range(2, x.ndim)), starts, ends, stride))
    return paddle.stack(cells, axis=2).reshape([batch, channels * math.prod(kernel), math.prod(out)])


@register_grad_rule(nn.Conv1D, nn.Conv2D, nn.Conv3D, input_free=["bias"])
def convolution(layer: nn.Layer, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """∂W = Σ over output positions of g · patchᵀ within each group (Rochette et al. 2019; Bu et al. 2022)."""
    g = widen(output_grad)
    if layer._channel_dim != 1:
        g = g.transpose([0, g.ndim - 1, *range(1, g.ndim - 1)])
    batch, out_channels, *out = g.shape
    g = g.reshape([batch, out_channels, -1])
    groups = layer._groups

    def weight() -> Factor:
        x, dilation = padded_input(layer, widen(inputs[0]))
        unfolded = patches(x, layer._kernel_size, layer._stride, dilation, out)
        rows = g.reshape([batch, groups, out_channels // groups, -1]).transpose([0, 1, 3, 2])
        cols = unfolded.reshape([batch, groups, unfolded.shape[1] // groups, -1]).transpose([0, 1, 3, 2])
        return formed_or_lazy(Outer(rows, cols, shape=layer.weight.shape))

    return {"weight": weight, "bias": lambda: Dense(g.sum(axis=2))}
