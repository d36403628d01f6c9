"""What would let one sample's data move another sample's gradient, caught before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddle import nn
from paddle.nn.layer.norm import _BatchNormBase

from paddle_privacy.errors import UnsupportedLayer
from paddle_privacy.gradients.hooks import LayerHooks

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture


def mixes_samples(layer: nn.Layer) -> bool:
    """Whether the layer's training mode computes statistics over the batch."""
    return isinstance(layer, (_BatchNormBase, nn.BatchNorm))


class MixingGuard(LayerHooks):
    """On a batch-mixing layer, trainable or not: refuses to run it in training mode."""

    def before(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> None:
        if layer.training and not getattr(layer, "_use_global_stats", False):
            raise UnsupportedLayer(
                f"layer '{self.path}' ({type(layer).__name__}) in training mode mixes the samples of a batch (and "
                "keeps their statistics un-noised), with or without trainable parameters; replace it by GroupNorm "
                "(ModuleValidator.fix does it) or put it in eval() mode"
            )
