"""Paddle's own gradient averaging stands down where a private optimizer does the job.

``paddle.DataParallel`` averages the batch gradients of its parameters across ranks during ``backward()``: unclipped
and without noise. Under a private optimizer these gradients do not exist (taps suppress them), so the reducer would
wait for what never comes, or fill ``.grad`` with zeros for parameters that it finds unused. With ``grad_need_sync`` off
it does nothing at all, as inside ``DataParallel.no_sync()``.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import TYPE_CHECKING

import paddle
from paddle import nn

from paddle_privacy.errors import PrivacyWarning, UnsupportedLayer
from paddle_privacy.gradients.hooks import LayerHooks

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture

_FORWARD = paddle.DataParallel.forward.__code__


class ReducerHooks(LayerHooks):
    """On an outermost model: switches off the reducer of a ``DataParallel`` around it, whenever that was wrapped.

    A wrapper that splits the model among ranks is refused instead. The model runs inside the wrapper's forward, before
    the wrapper prepares its reducer.
    """

    def __init__(self, capture: Capture, layer: nn.Layer, path: str, say: bool):
        super().__init__(capture, layer, path)
        self._say = say

    def before(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is _FORWARD:
                self.stand_down(frame.f_locals["self"])
            elif frame.f_code.co_name == "forward":
                refuse_split_model(frame.f_locals.get("self"), self.path)
            frame = frame.f_back

    def stand_down(self, wrapper: paddle.DataParallel) -> None:
        if wrapper.grad_need_sync:
            wrapper.grad_need_sync = False
            if self._say:
                warnings.warn(
                    "paddle.DataParallel averages raw gradients across ranks; it was switched off for this model, and "
                    "the private optimizer adds the clipped, noised gradients of all ranks instead",
                    PrivacyWarning,
                    stacklevel=2,
                )


# What splits a model among ranks: a rank then sees a part of each sample's gradient, and clipping that part by its own
# norm bounds nothing.
_SPLIT_MODELS = {
    "GroupShardedStage2": "group_sharded_parallel reduces raw gradients in hooks of its own, so leave it out and pass "
    "sharding_stage=2 to the private optimizer",
    "GroupShardedStage3": "parameter sharding (stage 3) keeps a slice of each parameter on a rank, so no rank sees a "
    "sample's whole gradient norm",
    "FullyShard": "parameter sharding keeps a slice of each parameter on a rank, so no rank sees a "
    "sample's whole gradient norm",
    "PipelineLayer": "a pipeline stage sees the gradient norm of its own layers only",
    "PipelineParallel": "a pipeline stage sees the gradient norm of its own layers only",
    "TensorParallel": "tensor parallelism splits layers among ranks, so no rank sees a sample's whole gradient norm",
    "SegmentParallel": "sequence parallelism splits samples among ranks, so no rank sees a sample's whole gradient",
}


_REMEDY = "train with data parallelism (with sharding_stage=2, LoRA or recompute where memory is short)"


def refuse_split_model(layer: object, path: str) -> None:
    """Raises UnsupportedLayer where `layer` is one of Paddle's ways to split a model, a sample or an update."""
    for kind in type(layer).__mro__:
        if kind.__name__ in _SPLIT_MODELS and kind.__module__.startswith("paddle."):
            raise UnsupportedLayer(
                f"layer '{path}' ({type(layer).__name__}): {_SPLIT_MODELS[kind.__name__]}; {_REMEDY}"
            )


def refuse_split_models(roots: list[nn.Layer], names: dict[int, str]) -> None:
    """Raises UnsupportedLayer where a rank holds only a part of the model or of a sample.

    Args:
        roots: the outermost models.
        names: path of each managed parameter, by id.
    """
    for root in roots:
        for path, layer in root.named_sublayers(include_self=True):
            refuse_split_model(layer, path or type(root).__name__)
            for name, parameter in layer._parameters.items():
                if parameter is None or id(parameter) not in names:
                    continue
                if getattr(parameter, "is_distributed", False) or parameter.is_dist():
                    raise UnsupportedLayer(
                        f"layer '{path or type(root).__name__}' ({type(layer).__name__}): its parameter '{name}' is "
                        f"split among ranks, so no rank sees a sample's whole gradient norm; {_REMEDY}"
                    )
