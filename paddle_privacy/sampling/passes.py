"""How often a row of a shuffled loader may have taken part: one participation a pass, and never fewer."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from paddle_privacy.sampling.detect import SEARCHES, SamplingScheme, in_use, live_iterators


class PassCounter:
    """Counts the passes over a loader in which each row is used at most once (``scheme.kind == "shuffle"``).

    Ask :meth:`observe` once for each ``backward()``, before its rows are added to anything. Every new iteration of
    the loader is a pass, so is every ``backward()`` beyond the batches that a pass has, and so is every
    ``backward()`` for which no iteration of the loader is in use (batches kept from earlier, or a loader made anew):
    such rows could be any. A pass that was broken off counts in full.

    The search for iterators goes through the garbage collector, so it runs only when something could have changed:
    when the known iteration has ended, or when the sampler is held by more owners than before.
    """

    def __init__(self, scheme: SamplingScheme) -> None:
        if scheme.kind != "shuffle":
            raise ValueError(f'scheme.kind must be "shuffle", got {scheme.kind!r}')
        assert scheme.steps_per_epoch is not None
        self._sampler = scheme.sampler
        self._batches_a_pass = scheme.steps_per_epoch
        self._known: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []
        self._owners = -1
        self._batches = 0
        self.passes = 0

    def observe(self) -> int:
        """Passes that began with this ``backward()``: how often to charge one more participation of every row."""
        self._batches += 1
        with SEARCHES:
            began = 0 if self._settled() else self._search()
        if began == 0 and self._batches > self._batches_a_pass:
            began = 1
        if began:
            self._batches = 1
        self.passes += began
        return began

    def _settled(self) -> bool:
        if sys.getrefcount(self._sampler) != self._owners:
            return False
        # The references are held in a list for as long as in_use() counts the owners, as in a search.
        held = [ref() for ref, _ in self._known[-1:]]
        return any(it is not None and it._sampler_iter is self._known[-1][1]() and in_use(it) for it in held)

    def _search(self) -> int:
        began = 0
        alive: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []
        for iterator in live_iterators(self._sampler):
            # A persistent iterator is reused; what is new in a pass is the iterator over its sampler.
            order = iterator._sampler_iter
            alive.append((weakref.ref(iterator), weakref.ref(order)))
            if not any(known() is order for _, known in self._known):
                began += 1
        self._known = alive
        iterator = order = None
        self._owners = sys.getrefcount(self._sampler)
        return began if alive else 1
