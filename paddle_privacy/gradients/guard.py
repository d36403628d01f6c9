"""What would let a sample count more than its bound, caught before it runs or before it is added."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from paddle import Tensor, nn
from paddle.nn.layer.norm import _BatchNormBase

from paddle_privacy.errors import PrivacyError, PrivacyWarning, UnsupportedLayer
from paddle_privacy.gradients.hooks import LayerHooks

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture, Group


def mixes_samples(layer: nn.Layer) -> bool:
    """Whether the layer computes statistics over the batch in some mode."""
    return isinstance(layer, (_BatchNormBase, nn.BatchNorm))


def _takes_batch_statistics(layer: nn.Layer) -> bool:
    """Whether it does so now; `use_global_stats` overrides the mode, in either direction."""
    if isinstance(layer, nn.BatchNorm):
        return not layer._use_global_stats and (layer.training or layer._trainable_statistics)
    if isinstance(layer, nn.SyncBatchNorm) or layer._use_global_stats is None:
        return layer.training
    return not layer._use_global_stats


class MixingGuard(LayerHooks):
    """On a batch-mixing layer, trainable or not: refuses to run it on the batch's own statistics."""

    def __init__(self, capture: Capture, layer: nn.Layer, path: str):
        super().__init__(capture, layer, path)
        layer._forward_pre_hooks.move_to_end(self._handles[0]._hook_id, last=False)

    def before(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> None:
        if _takes_batch_statistics(layer):
            mode = "training mode" if layer.training else "eval mode with use_global_stats=False"
            raise UnsupportedLayer(
                f"layer '{self.path}' ({type(layer).__name__}) in {mode} mixes the samples of a batch (and "
                "keeps their statistics un-noised), with or without trainable parameters; replace it by GroupNorm "
                "(ModuleValidator.fix does it) or put it in eval() mode"
            )


_claims: dict[int, weakref.ref[Capture]] = {}


def claim(capture: Capture) -> None:
    """Makes `capture` the only one that taps its parameters: an earlier one over any of them can no longer step.

    Two private optimizers over one parameter would each see every gradient; the newer one is the one in use.
    """
    others = {ref() for ref in _claims.values()} - {None, capture}
    for other in others:
        assert other is not None
        shared = [name for key, name in other.located.names.items() if key in capture.parameters]
        if shared:
            other.superseded = (
                f"another private optimizer was built over parameters {shared}, and this one's hooks were taken off; "
                "step() the newer optimizer"
            )
            other.remove()
        elif {id(root) for root in other.located.roots} & {id(root) for root in capture.located.roots}:
            warnings.warn(
                "two private optimizers train parts of one model; each states the ε of its own parameters only, and "
                "the model as a whole costs the composition of both",
                PrivacyWarning,
                stacklevel=6,
            )
    dead = [key for key, ref in _claims.items() if ref() is None or ref().superseded]  # type: ignore[union-attr]
    for key in dead:
        del _claims[key]
    _claims.update((key, weakref.ref(capture)) for key in capture.parameters)


def refuse_other_gradients(capture: Capture, parameters: list[Tensor]) -> None:
    """Before an update: Paddle must find no gradient but the noisy one.

    Raises:
        PrivacyError: a parameter that is not captured, or a gradient that Paddle would prefer to ``.grad``.
    """
    added = [p.name for p in parameters if id(p) not in capture.parameters]
    if added:
        raise PrivacyError(
            f"parameters {added} were added after the optimizer was built, so their gradients are neither clipped nor "
            "noised; build a new optimizer with all parameters"
        )
    preferred = [capture.located.names[id(p)] for p in parameters if getattr(p, "main_grad", None) is not None]
    if preferred:
        raise PrivacyError(
            f"parameters {preferred} carry a main_grad, which Paddle's update would take instead of the noisy "
            "gradient; do not use mix_precision_utils with a private optimizer"
        )


def refuse_lost_owners(capture: Capture, model: nn.Layer, path: str) -> None:
    """When a structure is seen first: the owners of managed parameters are still where they were found."""
    present = {id(layer) for layer in model.sublayers(include_self=True)}
    for owner in capture.located.owners:
        trained = [name for name, p in owner.parameters.items() if capture.trainable(p)]
        if trained and owner.root is model and id(owner.layer) not in present:
            raise PrivacyError(
                f"layer '{owner.path}' ({type(owner.layer).__name__}), whose parameters {trained} the optimizer holds, "
                f"is no longer in '{path}'; build the optimizer after the model is converted, wrapped or fixed"
            )


def repeated_batch(group: Group, used: dict[int, Tensor]) -> PrivacyError | None:
    """The error to raise where `group` read a batch that an earlier backward() of the same step had read.

    Batches are compared as objects, not by content: equal rows are different samples. Inputs that are not batched
    (position ids, a mask) may be shared; the first batched input of a forward may not.
    """
    for key, x in group.inputs.items():
        if x.shape[0] == group.batch and key in used:
            return PrivacyError(
                "two backward() calls before one step() went through the same input tensor, so each of its rows would "
                "count twice (up to 2 × clip_norm); add the losses and call backward() once, or call clear_grad() "
                "between them"
            )
    return None
