"""How many more gradients a layer's parameters will get in a backward pass.

With per-layer clipping a layer's samples can be clipped and summed as soon as the last use of its parameters has its
output gradient; what they are made of is then freed while the backward pass goes on. With reentrant recompute only one
segment's activations are alive at a time, which keeps the saving that recompute is used for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from paddle import nn

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture


class Uses:
    """Counts of the uses that one :class:`Capture` waits for. Too high a count only means that nothing is early."""

    def __init__(self) -> None:
        self._waiting: Counter[int] = Counter()
        self._postponed: Counter[int] = Counter()
        # Parameters that are also used barely: their other uses are not calls of their layer.
        self.elsewhere: set[int] = set()

    def watched(self, capture: Capture, layer: nn.Layer, keys: Iterable[int]) -> None:
        """A call of `layer` waits for its output gradient."""
        self._waiting.update(keys)
        if self._postponed[id(layer)] and capture.running.entry is None:
            self._postponed[id(layer)] -= 1

    def postponed(self, layer: nn.Layer) -> None:
        """`layer` ran without gradients inside a forward that has them: recompute will run it again."""
        self._postponed[id(layer)] += 1

    def arrived(self, layer: int, keys: list[int]) -> bool:
        """One of the awaited gradients is there. Whether it was the last, for all of `keys`."""
        self._waiting.subtract(keys)
        last = not any(self._waiting[key] for key in keys) and not self._postponed[layer]
        return last and self.elsewhere.isdisjoint(keys)

    def forget(self) -> None:
        """The backward pass is over: what has not arrived is not awaited any more."""
        self._waiting.clear()
        self._postponed.clear()
