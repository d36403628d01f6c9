"""Poisson sampling in time and memory proportional to the batch, whatever the size of the data set.

Every row joins every batch independently with probability q. The gaps between the rows that join are then
independent geometric variables (Devroye, *Non-Uniform Random Variate Generation*, 1986, chapter X.2), so a batch
is found by drawing about qN gaps instead of N coins.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sized
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import paddle.distributed as dist
from paddle.io import BatchSampler, IterableDataset

from paddle_privacy.errors import PrivacyWarning
from paddle_privacy.sampling.emissions import Emission, Emissions

if TYPE_CHECKING:
    from paddle_privacy.accounting.events import Event

_Words = Callable[[int], "np.ndarray[Any, np.dtype[np.uint64]]"]

# Gaps are stretched by this much, so that rounding in the logarithms (2^-51) and in the 64-bit uniforms can only
# make a row rarer than the accounted rate, never more frequent. At a batch of 10^6 rows it costs 0.0003 rows.
_STRETCH = 2.0**-32


class PoissonBatchSampler(BatchSampler):
    """Batches in which every row is included independently with probability ``sample_rate``.

    Args:
        dataset: anything with ``len``; only its length is used.
        batch_size: expected number of rows in a batch, ``0 < batch_size <= N``. The realised number is
            Binomial(N, batch_size / N).
        sample_rate: q in (0, 1], instead of ``batch_size``.
        num_rows: N, instead of ``dataset``.
        steps: logical batches an iteration; by default ``ceil(N / batch_size)`` in integer arithmetic.
        max_physical_batch_size: split each logical batch into pieces of at most so many rows.
        micro_batches: split each logical batch into exactly so many pieces, for loops that step after a fixed
            number of ``backward()`` calls (gradient accumulation). ``batch_size`` is that of the whole.
        num_replicas, rank: the processes of a data-parallel run, and which of them this is; by default those of
            ``paddle.distributed``, where that is initialised. Each rank draws from its own share of the rows (rank,
            rank + num_replicas, …) at the rate q, so that all ranks together draw a Poisson batch over all N rows.
            ``batch_size``, N and the rate are those of all ranks together; ``max_physical_batch_size`` is a rank's own.
        seed: for tests only. Whoever knows it knows who was in which batch, and the sampling no longer amplifies
            privacy. Iterations and ranks still differ from each other.

    An empty draw yields ``[0]``: the loop needs no special case, and :attr:`emissions` tells the optimizer to give
    that row weight zero. A loop that may skip batches takes them from a
    :class:`~paddle_privacy.sampling.PoissonDataLoader` (the engine returns one): over a plain ``DataLoader`` only their
    numbers of rows tell batches apart.

    Without a seed every random bit comes from the operating system's generator at the moment it is used, so nothing is
    repeated by an iteration, a fork or a resumed run.

    ``len(sampler)`` is the number of batches it yields with ``micro_batches``, and of *logical* batches otherwise (how
    many pieces of ``max_physical_batch_size`` there will be is not known beforehand).

    Raises:
        ValueError: an argument is out of range, or both or neither of a pair are given.
        TypeError: ``dataset`` has no length, or an argument is of the wrong type.
    """

    def __init__(
        self,
        dataset: Sized | None = None,
        batch_size: int | float | None = None,
        *,
        sample_rate: float | None = None,
        num_rows: int | None = None,
        steps: int | None = None,
        max_physical_batch_size: int | None = None,
        micro_batches: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.num_rows = _count_rows(dataset, num_rows)
        size, self.sample_rate, whole_steps = _rate(batch_size, sample_rate, self.num_rows)
        self.batch_size = size  # type: ignore[assignment]  # Paddle knows only whole sizes; an expected one may be broken
        self.steps = whole_steps if steps is None else _at_least_one("steps", steps)
        if max_physical_batch_size is not None and micro_batches is not None:
            raise ValueError("pass either max_physical_batch_size or micro_batches, not both")
        self.max_physical_batch_size = (
            None
            if max_physical_batch_size is None
            else _at_least_one("max_physical_batch_size", max_physical_batch_size)
        )
        self.micro_batches = None if micro_batches is None else _at_least_one("micro_batches", micro_batches)
        self.num_replicas, self.rank = _replicas(num_replicas, rank)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ValueError(f"seed must be a non-negative integer or None, got {seed!r}")
        if seed is not None:
            warnings.warn(
                "a seeded PoissonBatchSampler is for tests: whoever knows the seed knows who was in which batch",
                PrivacyWarning,
                stacklevel=2,
            )
        self.seed = seed
        self.emissions = Emissions()
        # Read by Paddle's own DataLoader code from any BatchSampler.
        self.shuffle = True
        self.drop_last = False
        self._acc_steps = 1

    def event(self, mechanism: Event) -> Event:
        """What one logical batch under ``mechanism`` costs: the Poisson-subsampled mechanism."""
        from paddle_privacy.accounting.events import PoissonSampled

        return PoissonSampled(self.sample_rate, mechanism)

    @property
    def _own_rows(self) -> int:
        """How many of the N rows are this rank's."""
        return len(range(self.rank, self.num_rows, self.num_replicas))

    def __len__(self) -> int:
        return self.steps * (self.micro_batches or 1)

    def __iter__(self) -> Iterator[list[int]]:
        # Not a generator function: the generation has to begin here and not at the first `next`, which the
        # loader's reader thread runs later.
        generation, _ = self.emissions.restart()
        return self._emit(generation, _words(self.seed, generation, self.rank))

    def _emit(self, generation: int, words: _Words) -> Iterator[list[int]]:
        for step in range(self.steps):
            rows = poisson_rows(self._own_rows, self.sample_rate, words) * self.num_replicas + self.rank
            pieces = self._split(rows.tolist())
            for i, piece in enumerate(pieces):
                self.emissions.record(Emission(len(piece), not piece, i + 1 == len(pieces), generation, step))
                yield piece or [0]

    def _split(self, rows: list[int]) -> list[list[int]]:
        if self.micro_batches is not None:
            k = self.micro_batches
            bounds = [len(rows) * i // k for i in range(k + 1)]
            return [rows[a:b] for a, b in zip(bounds, bounds[1:])]
        size = self.max_physical_batch_size
        if size is None or len(rows) <= size:
            return [rows]
        return [rows[i : i + size] for i in range(0, len(rows), size)]


def poisson_rows(num_rows: int, sample_rate: float, words: _Words) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One Poisson draw: the indices that joined, increasing, int64 of shape ``[realised]``.

    ``words(k)`` gives k independent uniform 64-bit words. Expected cost and memory O(sample_rate * num_rows).
    Each row joins with a probability within ``(1 - 2^-31, 1] * sample_rate``: rounding is on the side of privacy.
    """
    if sample_rate >= 1.0 or num_rows == 0:
        return np.arange(num_rows, dtype=np.int64)
    rate = -math.log1p(-sample_rate) * (1.0 - _STRETCH)
    expected = sample_rate * num_rows
    draws = int(expected + 6.0 * math.sqrt(expected) + 16.0)
    found: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    position = -1
    while True:
        # A gap longer than the data set ends the draw whatever its length; the clip keeps the sums in int64.
        gaps = np.minimum(np.floor(_exponentials(words(draws)) / rate) + 1.0, float(num_rows + 1)).astype(np.int64)
        rows = position + np.cumsum(gaps)
        inside = int(np.searchsorted(rows, num_rows))
        found.append(rows[:inside])
        if inside < draws:
            return np.concatenate(found)
        position = int(rows[-1])


def _exponentials(words: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Standard exponentials, one a word, with full relative precision at both ends.

    The top bit says in which half of (0, 1) the uniform lies, the other 63 how far from the nearer end: -log1p(-x)
    resolves short gaps at tiny rates, -log(x) the long tail.
    """
    x = ((words & np.uint64(2**63 - 1)).astype(np.float64) + 0.5) * 2.0**-64
    return np.where(words >> np.uint64(63) == 0, -np.log1p(-x), -np.log(x))


def _words(seed: int | None, generation: int, rank: int = 0) -> _Words:
    if seed is None:
        return lambda count: np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    stream = np.random.Generator(
        np.random.Philox(np.random.SeedSequence((seed, generation, rank) if rank else (seed, generation)))
    )
    return lambda count: stream.integers(0, 2**64, size=count, dtype=np.uint64)


def _count_rows(dataset: Sized | None, num_rows: int | None) -> int:
    if (dataset is None) == (num_rows is None):
        raise ValueError("pass exactly one of dataset and num_rows")
    if dataset is None:
        return _at_least_one("num_rows", num_rows)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"dataset must have a length and be indexable to be Poisson sampled, got {type(dataset).__name__}; "
            "load a stream into a map-style paddle.io.Dataset first"
        )
    return _at_least_one("len(dataset)", len(dataset))


def _rate(batch_size: int | float | None, sample_rate: float | None, num_rows: int) -> tuple[int | float, float, int]:
    """Expected batch size, q, and the logical batches that make one expected pass over the rows."""
    if (batch_size is None) == (sample_rate is None):
        raise ValueError("pass exactly one of batch_size and sample_rate")
    if batch_size is not None:
        _check_number("batch_size", batch_size)
        if not 0 < batch_size <= num_rows:
            raise ValueError(f"batch_size must be in (0, {num_rows}], the number of rows, got {batch_size!r}")
        size = Fraction(batch_size)
        return batch_size, float(size / num_rows), math.ceil(num_rows / size)
    assert sample_rate is not None
    _check_number("sample_rate", sample_rate)
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate!r}")
    # 0.1 as a float is a little over a tenth; the user meant ten steps an epoch.
    steps = math.ceil(1 / Fraction(sample_rate).limit_denominator(10**12))
    return sample_rate * num_rows, float(sample_rate), steps


def _replicas(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    if (num_replicas is None) != (rank is None):
        raise ValueError("pass both of num_replicas and rank, or neither")
    if num_replicas is None or rank is None:
        return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    replicas = _at_least_one("num_replicas", num_replicas)
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise TypeError(f"rank must be an integer, got {rank!r}")
    if not 0 <= rank < replicas:
        raise ValueError(f"rank must be in [0, {replicas}), got {rank!r}")
    return replicas, int(rank)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")


def _at_least_one(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be a positive integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)
