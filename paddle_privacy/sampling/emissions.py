"""What a sampler emitted, so that the optimizer can reconcile it with what the layers saw.

The optimizer sees tensors, never indices. It has to know, for every ``backward()``, whether the rows were drawn
or are a stand-in for an empty draw, and whether the logical batch is complete. A :class:`paddle.io.DataLoader`
runs the batch sampler in the main process (in its reader thread, or while it hands indices to its workers), ahead
of the user's loop but in the same order; so a first-in first-out queue tells all three.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from paddle_privacy.errors import PrivacyError


@dataclass(frozen=True)
class Emission:
    """One physical batch, as the sampler emitted it.

    Attributes:
        rows: rows of it that were drawn; 0 for a placeholder.
        placeholder: the draw was empty, and the batch holds row 0 of the data set only so that collation works.
            Its gradient has to be given weight zero.
        last: it completes its logical batch, which is when one update is due.
        generation: which ``iter(sampler)`` it came from, counted from 1.
        step: which logical batch of that generation, counted from 0. Sums collected under another
            ``(generation, step)`` are leftovers and have to be discarded.
    """

    rows: int
    placeholder: bool
    last: bool
    generation: int
    step: int

    @property
    def seen(self) -> int:
        """Rows that a layer sees of it."""
        return 1 if self.placeholder else self.rows


class Emissions:
    """The queue of a sampler's current generation.

    Without a delivering loader the queue is strictly first-in first-out: one :meth:`take` per ``backward()``.
    A loader that reports every batch it hands to the user (:meth:`deliver`) makes reconciliation exact: skipped
    batches are dropped from the queue, and a second ``backward()`` on a batch is refused whatever its size.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Emission] = deque()
        self._generation = 0
        self._delivered: Emission | None = None
        self._delivers = False

    @property
    def generation(self) -> int:
        """How often the sampler has been iterated so far."""
        return self._generation

    @property
    def pending(self) -> int:
        """Physical batches emitted and not yet taken (a loader prefetches a few)."""
        return len(self._queue)

    def restart(self) -> tuple[int, list[Emission]]:
        """Begin a generation; returns its number and what the one before had emitted and nobody took."""
        with self._lock:
            self._generation += 1
            leftovers = list(self._queue)
            self._queue = deque()
            self._delivered = None
            self._delivers = False
            return self._generation, leftovers

    def record(self, emission: Emission) -> None:
        """Called by the sampler before it yields. Emissions of an abandoned generation are dropped."""
        with self._lock:
            if emission.generation == self._generation:
                self._queue.append(emission)

    def deliver(self, generation: int) -> None:
        """Called by a delivering loader each time it hands a batch of ``generation`` to the user's loop.

        Raises:
            PrivacyError: another iteration has started since, so this batch cannot be told apart any more.
        """
        with self._lock:
            if generation != self._generation:
                raise PrivacyError(
                    "a second iteration of the same loader was started while this one was in use; finish or leave "
                    "one loop before starting the next, or use a sampler and loader of its own for each"
                )
            self._delivers = True
            self._delivered = self._queue.popleft() if self._queue else None

    def take(self, rows_seen: int) -> Emission:
        """The emission behind the ``backward()`` that just closed, over ``rows_seen`` rows.

        Raises:
            PrivacyError: the rows do not match, so it is not known which draw they came from. The queue is left as
                it was.
        """
        with self._lock:
            if self._delivers:
                head = self._delivered
                if head is None:
                    raise PrivacyError(
                        "backward() ran a second time on the same batch; a second gradient would give each of its "
                        "rows twice the clip norm, so add the losses and call backward() once for each batch"
                    )
            elif self._queue:
                head = self._queue[0]
            else:
                raise PrivacyError(
                    f"backward() saw a batch of {rows_seen} rows but the Poisson sampler has emitted none that is "
                    "still open; call backward() once for each batch and take the batches from its own loader"
                )
            if rows_seen != head.seen:
                drawn = "an empty batch (1 placeholder row)" if head.placeholder else f"{head.rows} rows"
                raise PrivacyError(
                    f"backward() saw {rows_seen} rows where the Poisson sampler emitted {drawn}; rows may not be "
                    "added, dropped or repeated between the loader and the model, and each batch takes exactly one "
                    "backward() (was a batch skipped, used twice, or another iteration of the loader started?)"
                )
            if self._delivers:
                self._delivered = None
            else:
                self._queue.popleft()
            return head
