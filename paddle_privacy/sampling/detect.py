"""What a given loader really does with the rows, read from its parts and never from its length."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from dataclasses import dataclass
from typing import Any

from paddle.io import (
    BatchSampler,
    DataLoader,
    DistributedBatchSampler,
    IterableDataset,
    RandomSampler,
    SequenceSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from paddle.io.dataloader import dataloader_iter

from paddle_privacy.errors import PrivacyError
from paddle_privacy.sampling.poisson import PoissonBatchSampler

_ITERATORS = (dataloader_iter._DataLoaderIterSingleProcess, dataloader_iter._DataLoaderIterMultiProcess)


@dataclass(frozen=True)
class SamplingScheme:
    """How a loader samples, as far as can be proven from its parts.

    Attributes:
        kind: ``"poisson"`` (every row independently in every batch), ``"shuffle"`` (every row at most once a pass,
            in any order), or ``"unknown"`` (nothing can be said beyond: at most once a batch is *assumed*).
        num_rows: N, or None.
        batch_size: rows a logical batch (expected rows when Poisson), or None.
        steps_per_epoch: logical batches a pass, or None.
        drop_last: an incomplete last batch is dropped.
        reason: for reports: what was found.
        sampler: the batch sampler it was read from; a :class:`PoissonBatchSampler` when Poisson.
    """

    kind: str
    num_rows: int | None
    batch_size: int | float | None
    steps_per_epoch: int | None
    drop_last: bool
    reason: str
    sampler: Any

    @property
    def ranks(self) -> int:
        """Among how many processes the sampler shares the rows, each row to one of them."""
        if isinstance(self.sampler, PoissonBatchSampler):
            return self.sampler.num_replicas
        return self.sampler.nranks if type(self.sampler) is DistributedBatchSampler else 1

    @property
    def sample_rate(self) -> float | None:
        """batch_size / N (never 1 / len(loader)), or None where either is unknown."""
        if self.num_rows is None or self.batch_size is None:
            return None
        return min(1.0, self.batch_size / self.num_rows)


def detect_sampling(data_loader: Any) -> SamplingScheme:
    """Read the sampling scheme of a :class:`paddle.io.DataLoader`, of one of its iterators, or of a batch sampler.

    Raises:
        PrivacyError: the loader can put a row into one batch more than once, which the clip norm does not bound, or
            streams rows that cannot be counted.
        TypeError: it is none of the three.
    """
    if isinstance(data_loader, _ITERATORS):
        dataset, sampler = data_loader._dataset, data_loader._batch_sampler
    elif isinstance(data_loader, DataLoader):
        dataset, sampler = data_loader.dataset, data_loader.batch_sampler
    elif isinstance(data_loader, BatchSampler):
        dataset, sampler = None, data_loader
    else:
        raise TypeError(f"data_loader must be a paddle.io.DataLoader, got {type(data_loader).__name__}")
    if isinstance(dataset, IterableDataset):
        raise PrivacyError(
            f"data_loader streams from the IterableDataset {type(dataset).__name__}, whose rows can be neither counted "
            "nor sampled; load it into a map-style paddle.io.Dataset"
        )
    if sampler is None:
        return _unknown(None, "batch_size=None: what the data set calls one item may be any number of rows")
    if isinstance(sampler, PoissonBatchSampler):
        return SamplingScheme(
            "poisson",
            sampler.num_rows,
            sampler.batch_size,
            sampler.steps,
            False,
            f"PoissonBatchSampler, every row with probability {sampler.sample_rate:g}"
            + (f", shared among {sampler.num_replicas} ranks" if sampler.num_replicas > 1 else ""),
            sampler,
        )
    kind = type(sampler)
    if isinstance(sampler, DistributedBatchSampler):
        if kind.__iter__ is not DistributedBatchSampler.__iter__:
            return _unknown(sampler, f"custom batch sampler {kind.__name__}")
        return _distributed(sampler)
    if not isinstance(sampler, BatchSampler) or kind.__iter__ is not BatchSampler.__iter__:
        return _unknown(sampler, f"custom batch sampler {kind.__name__}")
    rows = _rows_once(sampler.sampler)
    if rows is None:
        return _unknown(sampler, f"custom sampler {type(sampler.sampler).__name__}")
    size = sampler.batch_size * getattr(sampler, "_acc_steps", 1)
    steps = rows // size if sampler.drop_last else -(-rows // size)
    reason = f"{type(sampler.sampler).__name__}, every row at most once a pass"
    return SamplingScheme("shuffle", rows, size, steps, sampler.drop_last, reason, sampler)


def _rows_once(order: Any) -> int | None:
    """Rows that ``order`` visits at most once each in a pass; None where that cannot be told."""
    if isinstance(order, WeightedRandomSampler):
        if order.replacement:
            raise PrivacyError(
                "data_loader uses a WeightedRandomSampler with replacement, which can put a row into one batch several "
                "times; that multiplies its bound, so sample rows uniformly and put the weights elsewhere"
            )
        return None
    if isinstance(order, RandomSampler):
        if order.replacement:
            raise PrivacyError(
                "data_loader uses RandomSampler(replacement=True), which can put a row into one batch several times; "
                "pass replacement=False or a PoissonBatchSampler"
            )
        if order.generator is not None or type(order).__iter__ is not RandomSampler.__iter__:
            return None
        return order.num_samples
    if isinstance(order, SubsetRandomSampler):
        if type(order).__iter__ is not SubsetRandomSampler.__iter__:
            return None
        if len(set(order.indices)) != len(order.indices):
            raise PrivacyError("data_loader uses a SubsetRandomSampler whose indices repeat rows; pass each row once")
        return len(order.indices)
    if isinstance(order, SequenceSampler) and type(order).__iter__ is SequenceSampler.__iter__:
        return len(order.data_source)
    return len(order) if isinstance(order, range) else None


def _distributed(sampler: DistributedBatchSampler) -> SamplingScheme:
    rows, ranks = len(sampler.dataset), sampler.nranks
    if rows % ranks:
        raise PrivacyError(
            f"DistributedBatchSampler repeats rows to make {rows} divisible by {ranks} ranks, so a row can be in one "
            "step twice; drop rows until it divides, or use a PoissonBatchSampler on every rank"
        )
    size = sampler.batch_size * getattr(sampler, "_acc_steps", 1)
    share = rows // ranks
    steps = share // size if sampler.drop_last else -(-share // size)
    reason = f"DistributedBatchSampler over {ranks} rank(s), every row at most once a pass"
    return SamplingScheme("shuffle", rows, size * ranks, steps, sampler.drop_last, reason, sampler)


def _unknown(sampler: Any, reason: str) -> SamplingScheme:
    return SamplingScheme("unknown", None, None, None, False, reason, sampler)


SEARCHES = threading.RLock()
"""Held while owners are counted: two threads that search at once would each count the other's references as owners."""


def live_iterators(sampler: Any = None) -> list[Any]:
    """DataLoader iterators in use now; only those over ``sampler`` if given.

    A search through every object the collector tracks: tens of milliseconds in a large process. Hold
    :data:`SEARCHES` for as long as the result is held.
    """
    # type(), not isinstance(): lazy proxies among the live objects import things when asked for their class.
    found = [
        it for it in gc.get_objects() if type(it) in _ITERATORS and (sampler is None or it._batch_sampler is sampler)
    ]
    return [it for it in found if in_use(it)]


def in_use(iterator: Any) -> bool:
    """Whether somebody still takes batches from a DataLoader iterator.

    One that a loop left by ``break`` lives on, because its reader thread holds it, and so does one made to peek at a
    batch. They are told by their owners: the thread, and a variable in which Paddle keeps its latest iterator. An
    iterator that is in use has at least one owner more. Call it with the iterator in a list: the count includes that.
    """
    if getattr(iterator, "_shutdown", True):
        return False
    owners = sys.getrefcount(iterator) - (getattr(dataloader_iter, "_loader", None) is iterator)
    # Erring towards False only makes epsilon larger.
    return owners - _owned_by_the_reader(iterator) > _owners_of_the_abandoned()


def _owned_by_the_reader(iterator: Any) -> int:
    """What the reader thread owns of ``iterator``: its target, until it ends, and every call of a method it is in."""
    methods = {f.__code__ for kind in type(iterator).__mro__ for f in vars(kind).values() if hasattr(f, "__code__")}
    depth = int(hasattr(iterator._thread, "_target"))
    frame = sys._current_frames().get(iterator._thread.ident)
    while frame is not None:
        depth += frame.f_code in methods
        frame = frame.f_back
    return depth


@functools.lru_cache(maxsize=1)
def _owners_of_the_abandoned() -> int:
    """Owners of an object that only a thread running a method of it holds, besides the thread; counted as above."""

    class Reader:
        def __init__(self) -> None:
            self.running, self.end = threading.Event(), threading.Event()
            self._thread = threading.Thread(target=self.loop, daemon=True)
            self._thread.start()
            self.running.wait()

        def loop(self) -> None:
            self.running.set()
            self.end.wait()

    def count(iterator: Any) -> int:
        return sys.getrefcount(iterator) - _owned_by_the_reader(iterator)

    readers = [Reader()]
    counts = [count(reader) for reader in readers]
    readers[0].end.set()
    return counts[0]


def find_live_loader() -> Any | None:
    """The one loader that is being iterated now, as an iterator of it, for :func:`detect_sampling`.

    None where no loader is being iterated, or several are: a guess would be worth nothing.
    """
    with SEARCHES:
        return _only_one_of(live_iterators())


def _only_one_of(found: list[Any]) -> Any | None:
    if not found or any(it._batch_sampler is not found[0]._batch_sampler for it in found):
        return None
    return found[-1]
