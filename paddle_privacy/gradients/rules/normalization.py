"""Normalisation within a sample: y = γ ∘ x̂ + β, so G = Σ x̂ ∘ g and Σ g over what γ is shared across."""

from __future__ import annotations

import math

import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_privacy import kernels
from paddle_privacy.gradients.factors import Dense, widen
from paddle_privacy.gradients.rules.linear import positions
from paddle_privacy.gradients.rules.registry import Lazy, register_grad_rule


# Paddle 3.3's CPU kernel leaves γ out of the input gradient when γ wants none.
@register_grad_rule(nn.LayerNorm, input_free=["bias"], shadowed=["weight"])
def layer_norm(layer: nn.LayerNorm, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """Ba et al. 2016; the normalised shape may span several axes, the parameters are flat."""
    width = math.prod(layer._normalized_shape)
    g = widen(output_grad).reshape([output_grad.shape[0], -1, width])

    def weight() -> Dense:
        x = widen(inputs[0]).reshape(g.shape)
        return Dense(kernels.norm_layer_sums(x, g, layer._epsilon, centered=True, with_bias=False)[0])

    return {"weight": weight, "bias": lambda: Dense(g.sum(axis=1))}


@register_grad_rule(nn.GroupNorm, input_free=["bias"])
def group_norm(layer: nn.GroupNorm, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """Wu and He 2018."""
    g = widen(output_grad)
    channels_first = layer._data_format in ("NCHW", "NCL", "NCDHW", "NC")
    batch, channels = g.shape[0], g.shape[1 if channels_first else -1]
    positions = math.prod(g.shape[1:]) // channels

    def sums(x: Tensor) -> Tensor:
        shape = [batch, channels, positions] if channels_first else [batch, positions, channels]
        return x.reshape(shape).sum(axis=2 if channels_first else 1)

    def weight() -> Dense:
        x = widen(inputs[0])
        if not channels_first:
            return Dense(sums(F.group_norm(x, layer._num_groups, layer._epsilon, data_format=layer._data_format) * g))
        # A group's channels lie together, so that it is one long row for the kernel that normalises rows.
        rows = [batch * layer._num_groups, 1, channels // layer._num_groups * positions]
        products, _ = kernels.norm_layer_sums(
            x.reshape(rows), g.reshape(rows), layer._epsilon, centered=True, with_bias=False
        )
        return Dense(sums(products))

    return {"weight": weight, "bias": lambda: Dense(sums(g))}


def _instance_norm_refuses(layer: nn.Layer) -> str | None:
    if layer._data_format not in ("NC", "NCL", "NCHW", "NCDHW"):
        return f"data_format {layer._data_format!r} is not handled; use channels first"
    return None


@register_grad_rule(
    nn.InstanceNorm1D, nn.InstanceNorm2D, nn.InstanceNorm3D, input_free=["bias"], refuses=_instance_norm_refuses
)
def instance_norm(layer: nn.Layer, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """Ulyanov et al. 2016; Paddle's layer always normalises by the instance, never by running statistics."""
    g = widen(output_grad)
    over = list(range(2, g.ndim))

    def scale() -> Dense:
        return Dense((F.instance_norm(widen(inputs[0]), eps=layer._epsilon) * g).sum(axis=over))

    return {"scale": scale, "bias": lambda: Dense(g.sum(axis=over))}


@register_grad_rule(
    "paddlenlp.transformers.llama.modeling.LlamaRMSNorm",
    "paddlenlp.transformers.qwen2.modeling.Qwen2RMSNorm",
    "paddlenlp.transformers.mistral.modeling.MistralRMSNorm",
)
def rms_norm(layer: nn.Layer, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """y = γ ∘ x / √(mean x² + ε) (Zhang and Sennrich 2019)."""

    def weight() -> Dense:
        x, g = positions(widen(inputs[0])), positions(widen(output_grad))
        return Dense(kernels.norm_layer_sums(x, g, layer.variance_epsilon, centered=False, with_bias=False)[0])

    return {"weight": weight}
