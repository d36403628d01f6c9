"""Rows of a table picked by ids."""

from __future__ import annotations

import paddle
from paddle import Tensor, nn

from paddle_privacy.gradients.factors import Rows
from paddle_privacy.gradients.rules.registry import Lazy, register_grad_rule


def _refuses(layer: nn.Embedding) -> str | None:
    if layer._max_norm is not None:
        return "max_norm rewrites the table from the ids of the batch without noise; build it without max_norm"
    if layer._scale_grad_by_freq:
        return "scale_grad_by_freq scales a sample's gradient by what is in the other samples; build it without"
    return None


@register_grad_rule(nn.Embedding, lookup=True, refuses=_refuses)
def embedding(layer: nn.Embedding, inputs: tuple, output_grad: Tensor) -> dict[str, Lazy]:
    """G = Σₜ e(idₜ) gₜᵀ; the row `padding_idx` counts for nothing, as in the layer's own backward."""
    num_rows, dim = layer.weight.shape
    batch = output_grad.shape[0]

    def weight() -> Rows:
        ids = inputs[0].reshape([batch, -1])
        g = output_grad.reshape([batch, -1, dim])
        padding = layer._padding_idx
        if padding is not None:
            padding = padding if padding >= 0 else num_rows + padding
            # Chosen, not multiplied: 0 · inf is not 0.
            g = paddle.where((ids == padding).unsqueeze(-1), paddle.zeros([], g.dtype), g)
        return Rows(ids, g, num_rows)

    return {"weight": weight}
