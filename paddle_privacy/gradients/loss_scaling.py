"""What ``paddle.amp.GradScaler`` multiplied a loss by, so that gradients are clipped at their true size.

A scaler multiplies the loss before ``backward()`` and divides the parameters' ``.grad`` before the update. Per-sample
gradients are clipped in between and never are a ``.grad``, so the factor has to be known when the backward pass runs.
Paddle keeps no link from the scaled loss to its scaler; :func:`watch_loss_scaling` adds one, an attribute on the tensor
that ``GradScaler.scale`` returns. It is put in place when the first private optimizer is built.

A dynamic scaler lowers its factor when some gradient of the batch overflows. That is one bit about the samples,
released without noise into everything that comes after. A private optimizer therefore never tells a scaler of an
overflow: a sample that overflows is left out of its step (weight 0), the noise is added and the step is charged as
always, and the factor stays what it was.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from types import FrameType
from typing import Any, NamedTuple

from paddle import Tensor
from paddle.amp import AmpScaler

from paddle_privacy.errors import PrivacyError, PrivacyWarning

_ATTRIBUTE = "_paddle_privacy_scaled"


class Scaled(NamedTuple):
    """Which scaler multiplied a loss, and by how much."""

    scaler: weakref.ref[AmpScaler]
    factor: float


def watch_loss_scaling() -> None:
    """From now on every loss that a scaler scales says so. Idempotent."""
    original = AmpScaler.scale
    if hasattr(original, _ATTRIBUTE):
        return

    @functools.wraps(original)
    def scale(self: AmpScaler, var: Tensor) -> Tensor:
        scaled = original(self, var)
        if scaled is not var:
            factor: Any = self._scale
            setattr(scaled, _ATTRIBUTE, Scaled(weakref.ref(self), float(factor)))
        return scaled

    setattr(scale, _ATTRIBUTE, True)
    AmpScaler.scale = scale  # type: ignore[method-assign]


def scaling_of(backward: FrameType) -> Scaled | None:
    """How the losses of a running ``backward`` call were scaled; ``None`` where they were not.

    Raises:
        PrivacyError: the call has several losses that were scaled differently.
    """
    held = backward.f_locals
    losses = held["self"] if "self" in held else held.get("tensors", [])
    listed = losses if isinstance(losses, (list, tuple)) else [losses]
    found: list[Scaled | None] = [getattr(loss, _ATTRIBUTE, None) for loss in listed]
    if len({None if scaled is None else scaled.factor for scaled in found}) > 1:
        raise PrivacyError(
            "backward() got several losses that GradScaler scaled differently, so one factor cannot unscale their "
            "gradients; add the losses first and scale their sum"
        )
    return found[0] if found else None


class ScalerWatch:
    """One optimizer's side of loss scaling, from one step to the next."""

    def __init__(self) -> None:
        self.called_by_scaler = False
        self._unscaled_backward = False
        self._scaling: Scaled | None = None
        self._warned = False

    def saw(self, scaling: Scaled | None) -> None:
        """A backward pass of the coming step was scaled like this."""
        if scaling is None:
            self._unscaled_backward = True
        else:
            self._scaling = scaling

    def check(self) -> None:
        """Before an update.

        Raises:
            PrivacyError: ``GradScaler.step()`` asks for it, but a backward pass did not run on its scaled loss.
        """
        by_scaler, unscaled, scaling = self.called_by_scaler, self._unscaled_backward, self._scaling
        self.forget()
        if by_scaler and unscaled:
            raise PrivacyError(
                "GradScaler.step() was called, but backward() did not run on what scaler.scale(loss) returned, so what "
                "the gradients were multiplied by is not known; call scaler.scale(loss).backward(), with nothing done "
                "to the scaled loss in between"
            )
        scaler = scaling.scaler() if scaling is not None else None
        if scaling is None or scaler is None or not scaler.is_use_dynamic_loss_scaling():
            return
        # The factor would also grow by itself, until every sample overflows.
        scaler._incr_count = 0
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"dynamic loss scaling is held at {scaling.factor:g}: to change it when a sample overflows would "
                "release that without noise. Samples that overflow are left out and reported; if there are any, pass "
                "GradScaler a smaller init_loss_scaling (and use_dynamic_loss_scaling=False), or train in bfloat16",
                PrivacyWarning,
                stacklevel=4,
            )

    def forget(self) -> None:
        """The samples of the coming step were dropped."""
        self.called_by_scaler = self._unscaled_backward = False
        self._scaling = None
