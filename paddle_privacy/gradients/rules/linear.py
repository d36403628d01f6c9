"""Maps that are linear in each input: y = x W + b over any number of position axes, and the bilinear form."""

from __future__ import annotations

import paddle
from paddle import Tensor, nn

from paddle_privacy.gradients.factors import Dense, Outer, widen
from paddle_privacy.gradients.rules.registry import Lazy, register_grad_rule


def positions(x: Tensor) -> Tensor:
    """[B, *, d] with any number of position axes (none too) as [B, T, d]."""
    return x.reshape([x.shape[0], -1, x.shape[-1]]) if x.ndim != 3 else x


def sum_over_positions(x: Tensor) -> Tensor:
    """[B, *, d] -> [B, d]."""
    x = widen(x) if x.ndim == 2 else widen(positions(x))
    if x.ndim == 2:
        return x
    if x.shape[1] and x.place.is_cpu_place():
        # Paddle's CPU sum over a middle axis takes six times as long as the same sum as a product.
        return paddle.matmul(paddle.ones([1, x.shape[1]], x.dtype), x).squeeze(1)
    return x.sum(axis=1)


@register_grad_rule(nn.Linear, input_free=["bias"])
def linear(layer: nn.Linear, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """G = Σₜ xₜ gₜᵀ and Σₜ gₜ (Goodfellow 2015, arXiv:1510.01799)."""
    return {
        "weight": lambda: Outer(positions(inputs[0]), positions(output_grad)),
        "bias": lambda: Dense(sum_over_positions(output_grad)),
    }


@register_grad_rule(nn.Bilinear, input_free=["bias"])
def bilinear(layer: nn.Bilinear, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """yₖ = x₁ᵀ Wₖ x₂ + bₖ, so G = g ⊗ (x₁ ⊗ x₂)."""
    batch = output_grad.shape[0]

    def weight() -> Outer:
        pairs = widen(inputs[0]).unsqueeze(2) * widen(inputs[1]).unsqueeze(1)
        return Outer(output_grad.unsqueeze(1), pairs.reshape([batch, 1, -1]), shape=layer.weight.shape)

    return {"weight": weight, "bias": lambda: Dense(widen(output_grad).unsqueeze(1))}
