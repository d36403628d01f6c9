"""Adapters of paddlenlp.peft that hide their products from the stand-ins of :mod:`paddle_privacy.gradients.bare`.

`LoRALinear` needs no rule: its products are noticed (with dropout, mixer and MoRA too), once its fused forward is off.
"""

from __future__ import annotations

import paddle
from paddle import Tensor, nn

from paddle_privacy.gradients.factors import Dense, Outer, widen
from paddle_privacy.gradients.rules.linear import positions, sum_over_positions
from paddle_privacy.gradients.rules.registry import Lazy, register_grad_rule

# Attributes under which a layer computes the same by separate products.
SPELT_OUT: dict[str, dict[str, object]] = {
    "paddlenlp.peft.lora.lora_layers.LoRALinear": {"_use_quick_lora": False},
}


def _vera_dropout(layer: nn.Layer) -> bool:
    return isinstance(layer.vera_dropout, nn.Dropout) or layer.merged


@register_grad_rule("paddlenlp.peft.vera.vera_layers.VeRALinear", unless=_vera_dropout)
def vera_linear(layer: nn.Layer, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """y = xW + s · (xA ∘ d) B ∘ b (Kopiczko et al. 2024, arXiv:2310.11454)."""
    x, g = widen(positions(inputs[0])), widen(positions(output_grad)) * layer.scaling
    low = paddle.matmul(x, widen(layer.vera_A))
    back = paddle.matmul(g * layer.vera_b, widen(layer.vera_B), transpose_y=True)
    return {
        "vera_b": lambda: Dense((paddle.matmul(low * layer.vera_d, widen(layer.vera_B)) * g).sum(axis=1)),
        "vera_d": lambda: Dense((low * back).sum(axis=1)),
        "vera_A": lambda: Outer(x, back * layer.vera_d),
        "vera_B": lambda: Outer(low * layer.vera_d, g * layer.vera_b),
        "weight": lambda: Outer(x, positions(output_grad)),
        "bias": lambda: Dense(sum_over_positions(output_grad)),
    }
