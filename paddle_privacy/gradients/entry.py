"""One forward of the user's model, from the outermost layer that was called to its end.

The entry knows what the model was called with, hence which sizes the batch axis can have, and it is what the structure
probe (:mod:`paddle_privacy.gradients.probe`) replays. Entries are counted per thread: a forward in another thread is
another entry.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor, nn
from paddle.jit.dy2static.program_translator import StaticFunction

from paddle_privacy.errors import UnsupportedLayer
from paddle_privacy.gradients.hooks import LayerHooks, tensors
from paddle_privacy.gradients.probe import Recording

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture


class Entry:
    """The running forward of an outermost layer.

    Attributes:
        layer, path: the layer that was called.
        args, kwargs: what it was called with.
        sizes: the sizes of the first axes of its tensor inputs, one of which is the batch.
        rows: the batch size to which inputs of one row are expanded; ``None`` where no input tells.
        called: ids of the tapped layers that ran in it.
        structure: by what the structure probe knows the model in its present modes.
        stood_in: (layer, name) of the parameters that a stand-in replaces during this forward.
        by_rows: stand-ins for parameters (by id) whose gradients are taken from the model's outputs row by row.
        passed: ids of the layers that looked up something without a batch.
        recording: what the structure probe needs, while the structure is not verified.
    """

    def __init__(self, layer: nn.Layer, path: str, args: tuple, kwargs: dict, frame: FrameType | None):
        self.layer, self.path, self.args, self.kwargs, self.frame = layer, path, args, kwargs, frame
        self.inputs = [x for x in tensors((args, kwargs)) if x.ndim]
        firsts = [x.shape[0] for x in self.inputs]
        self.sizes = frozenset(firsts)
        # [1, T] position ids may come first; a batch of one row has nothing but ones.
        self.rows = next((n for n in firsts if n != 1), firsts[0] if firsts else None)
        self.called: set[int] = set()
        self.structure: tuple = ()
        self.stood_in: list[tuple[nn.Layer, str]] = []
        self.by_rows: dict[int, Tensor] = {}
        self.passed: set[int] = set()
        self.recording: Recording | None = None

    def check_rows(self, path: str, kind: str, rows: int) -> None:
        """Raises where a tapped layer's first axis has none of the sizes that the model was called with."""
        if self.sizes and rows not in self.sizes:
            found = " or ".join(str(n) for n in sorted(self.sizes))
            raise UnsupportedLayer(
                f"layer '{path}' ({kind}) sees {rows} rows on its first axis where '{self.path}' was called with "
                f"{found}; the first axis of every activation must be the batch, so keep positions on axes of their "
                "own ([B, T, d] instead of [B*T, d]) and give position ids as [B, T]"
            )


class Running(threading.local):
    """What runs in this thread: the entry, how deep its layers are nested, and which parameters are suppressed."""

    def __init__(self) -> None:
        self.entry: Entry | None = None
        self.depth = 0
        self.probing: Recording | None = None
        # Samples of the forward before: what recompute repeats a part of.
        self.last_rows: int | None = None
        # Leaves that took the place of parameters whose kernels insist on a gradient.
        self.shadows: list[Tensor] = []

    def abandoned(self, layer: nn.Layer) -> bool:
        """Whether the entry was cut short (KeyboardInterrupt skips Paddle's post-hooks) and `layer` begins anew."""
        if self.entry is None or layer is not self.entry.layer:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame is self.entry.frame:
                return False
            frame = frame.f_back
        return True

    def clear(self) -> None:
        self.entry, self.depth, self.shadows = None, 0, []


class EntryHooks(LayerHooks):
    """On every layer at or above an owner of managed parameters: the outermost one that is called is the entry."""

    def __init__(self, capture: Capture, layer: nn.Layer, path: str):
        super().__init__(capture, layer, path)
        # Around the tap of the same layer: begins before it and ends after it.
        layer._forward_pre_hooks.move_to_end(self._handles[0]._hook_id, last=False)
        layer._forward_post_hooks.move_to_end(self._handles[1]._hook_id)

    def before(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> None:
        running = capture.running
        if running.depth and running.abandoned(layer):
            running.clear()
            capture.restore_interrupted()
        if paddle.is_grad_enabled() and isinstance(layer.__dict__.get("forward"), StaticFunction):
            running.clear()
            raise UnsupportedLayer(
                f"'{self.path}' runs as a static graph (paddle.jit.to_static), in which layers cannot be seen; train "
                "the dygraph model, and convert it for deployment"
            )
        running.depth += 1
        if running.depth > 1 or running.probing is not None or capture.in_backward():
            return
        # The frame of Paddle's call of this layer; it is on the stack exactly as long as the forward runs.
        entry = Entry(layer, self.path, args, kwargs, sys._getframe(2))
        running.entry = entry
        if paddle.is_grad_enabled():
            running.last_rows = entry.rows
            entry.recording = capture.probe.begin(entry)
            capture.tied.begin(entry)

    def after(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict, output: Any) -> Any:
        running = capture.running
        running.depth = max(0, running.depth - 1)
        entry = running.entry
        if running.depth or entry is None or running.probing is not None:
            return None
        try:
            repeated = capture.tied.end(entry, output)
        finally:
            running.clear()
            entry.frame = None
        output = output if repeated is None else repeated
        if output is not None and paddle.is_grad_enabled() and entry.called:
            capture.probe.end(entry, output)
        return repeated
