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


def channels_last_positions(x: Tensor, data_format: str) -> Tensor:
    """[B, C, *] or [B, *, C] -> [B, T, C]."""
    if data_format in ("NCHW", "NCL", "NCDHW", "NC"):
        x = x.reshape([x.shape[0], x.shape[1], -1])
        return x.transpose([0, 2, 1])
    return x.reshape([x.shape[0], -1, x.shape[-1]])


@register_grad_rule(nn.GroupNorm, input_free=["bias"])
def group_norm(layer: nn.GroupNorm, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """Wu and He 2018."""
    g = channels_last_positions(widen(output_grad), layer._data_format)

    def weight() -> Dense:
        normalised = F.group_norm(
            widen(inputs[0]), layer._num_groups, epsilon=layer._epsilon, data_format=layer._data_format
        )
        return Dense((channels_last_positions(normalised, layer._data_format) * g).sum(axis=1))

    return {"weight": weight, "bias": lambda: Dense(g.sum(axis=1))}


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
