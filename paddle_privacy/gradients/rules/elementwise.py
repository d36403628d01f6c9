"""Activations with parameters."""

from __future__ import annotations

import paddle
from paddle import Tensor, nn

from paddle_privacy.gradients.factors import Dense, widen
from paddle_privacy.gradients.rules.registry import Lazy, register_grad_rule


@register_grad_rule(nn.PReLU)
def prelu(layer: nn.PReLU, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """y = x where x > 0, else αx, one α or one a channel (He et al. 2015): G = Σ min(x, 0) ∘ g."""

    def weight() -> Dense:
        x = widen(inputs[0])
        product = paddle.where(x < 0, x, paddle.zeros_like(x)) * widen(output_grad)
        batch = x.shape[0]
        if layer._weight.shape[0] == 1:
            return Dense(product.reshape([batch, -1]).sum(axis=1, keepdim=True))
        channel = 1 if layer._data_format[1] == "C" else x.ndim - 1
        over = [axis for axis in range(1, x.ndim) if axis != channel]
        return Dense(product.sum(axis=over) if over else product)

    return {"_weight": weight}
