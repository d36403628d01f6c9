"""Convolutions as matrix products over unfolded patches, group by group."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_privacy.gradients.factors import Dense, Factor, Unfolded, Use, widen
from paddle_privacy.gradients.rules.registry import Lazy, register_grad_rule

Pads = list[tuple[int, int]]


def _same_padding(sizes: list[int], kernel: list[int], stride: list[int]) -> Pads:
    """Paddle's "SAME": output ⌈size/stride⌉, the odd cell behind; dilation counts as 1."""
    needed = [max((math.ceil(n / s) - 1) * s + k - n, 0) for n, k, s in zip(sizes, kernel, stride)]
    return [(n // 2, n - n // 2) for n in needed]


def explicit_padding(layer: nn.Layer, sizes: list[int]) -> tuple[Pads, list[int]]:
    """(before, after) for each spatial axis, and the dilation, as the layer's forward applies them.

    `sizes` are those of the layer's input, which decide what "SAME" means.
    """
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


def channels_first(layer: nn.Layer, x: Tensor) -> Tensor:
    return x if layer._channel_dim == 1 else x.transpose([0, x.ndim - 1, *range(1, x.ndim - 1)])


def patches(x: Tensor, pads: Pads, kernel: list[int], stride: list[int], dilation: list[int], out: list[int]) -> Tensor:
    """[B, C, *sizes] -> [B, C·∏kernel, ∏out]; the cell of each patch in row-major order, as in the weight.

    `pads` of zeros are added around the map.
    """
    batch, channels = x.shape[:2]
    padded = any(before or after for before, after in pads)
    if not padded and math.prod(kernel) == math.prod(stride) == 1:
        return x.flatten(2)
    if len(kernel) == 2:
        (top, bottom), (left, right) = pads
        return F.unfold(x, kernel, stride, [top, left, bottom, right], dilation)
    if padded:
        # Spelt over every axis: the short forms of F.pad differ between ranks.
        x = F.pad(x, [0, 0, 0, 0, *itertools.chain(*pads)], pad_from_left_axis=True)
    cells = []
    for offsets in itertools.product(*(range(k) for k in kernel)):
        starts = [o * d for o, d in zip(offsets, dilation)]
        ends = [b + (n - 1) * s + 1 for b, n, s in zip(starts, out, stride)]
        cells.append(paddle.strided_slice(x, list(range(2, x.ndim)), starts, ends, stride))
    return paddle.stack(cells, axis=2).reshape([batch, channels * math.prod(kernel), math.prod(out)])


def flat_map(layer: nn.Layer, x: Tensor) -> Tensor:
    """[B, C, *sizes], or [B, *sizes, C] of a layer with channels last, -> [B, C, ∏sizes]."""
    return channels_first(layer, x).flatten(2)


def unfolded(
    layer: nn.Layer, rows: Tensor, source: Tensor, sizes: list[int], out: list[int], pad: Callable[[Tensor], Tensor]
) -> Factor:
    """Σ over cells of rows · patchᵀ, from the map whose cells they are and the map that is unfolded.

    `sizes` are those of the layer's input and `out` those of the map of `rows`; `pad` does what zeros do not.
    """
    pads, dilation = explicit_padding(layer, sizes)
    kernel, stride = layer._kernel_size, layer._stride

    def unfold(x: Tensor) -> Tensor:
        return patches(channels_first(layer, pad(widen(x))), pads, kernel, stride, dilation, out)

    use = Use(flat_map(layer, rows), source, unfold)
    return Unfolded([use], layer._groups, layer.weight.shape).formed_or_lazy()


def spatial(layer: nn.Layer, x: Tensor) -> list[int]:
    return list(x.shape[2:] if layer._channel_dim == 1 else x.shape[1:-1])


def sum_over_map(layer: nn.Layer, g: Tensor) -> Dense:
    """∂b [B, C] from ∂y of any number of spatial axes."""
    return Dense(flat_map(layer, widen(g)).sum(axis=2))


@register_grad_rule(nn.Conv1D, nn.Conv2D, nn.Conv3D, input_free=["bias"])
def convolution(layer: nn.Layer, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """∂W = Σ over output positions of g · patchᵀ within each group (Rochette et al. 2019; Bu et al. 2022)."""

    def pad(x: Tensor) -> Tensor:
        if layer._padding_mode == "zeros":
            return x
        pads = layer._reversed_padding_repeated_twice
        return F.pad(x, pads, mode=layer._padding_mode, data_format=layer._data_format)

    def weight() -> Factor:
        x = inputs[0]
        return unfolded(layer, output_grad, x, spatial(layer, x), spatial(layer, output_grad), pad)

    return {"weight": weight, "bias": lambda: sum_over_map(layer, output_grad)}


@register_grad_rule(nn.Conv1DTranspose, nn.Conv2DTranspose, nn.Conv3DTranspose, input_free=["bias"])
def transposed_convolution(layer: nn.Layer, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """The adjoint of a convolution from output to input: ∂W = Σ over *input* positions of x · patch(g)ᵀ."""

    def weight() -> Factor:
        sizes = spatial(layer, inputs[0])
        return unfolded(layer, inputs[0], output_grad, sizes, sizes, lambda g: g)

    return {"weight": weight, "bias": lambda: sum_over_map(layer, output_grad)}
