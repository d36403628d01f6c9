"""From events to the few one-dimensional mechanisms that the accountants know how to bound."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..errors import UnsupportedEvent
from .events import (
    Composed,
    Event,
    FixedSize,
    PoissonSampled,
    SelfComposed,
    ShuffledEpoch,
    TruncatedPoisson,
    combined_noise_multiplier,
)


@dataclass(frozen=True)
class SampledGaussian:
    """One noisy sum over one batch.

    ``sampling`` is "none" (every row, or one participation), "poisson" or "fixed" (without replacement); ``rate`` is
    the chance that a given row is in the batch; ``noise_multiplier`` is relative to one row's bound C.
    """

    sampling: str
    rate: float
    noise_multiplier: float
    relation: str

    @property
    def sensitivity(self) -> float:
        """How far one changed row moves the sum of the batch it is in, in units of C."""
        return 2.0 if self.relation == "replace_one" else 1.0


@dataclass(frozen=True)
class Truncation:
    """A batch of Binomial(dataset_size, rate) rows that is cut to ``max_batch_size``."""

    rate: float
    dataset_size: int
    max_batch_size: int

    def probability(self, extra_rows: int) -> float:
        """P[Binomial(dataset_size + extra_rows, rate) > max_batch_size], the chance that the cut does anything."""
        from scipy.special import bdtrc

        rows = self.dataset_size + extra_rows
        if self.max_batch_size >= rows or self.rate == 0:
            return 0.0
        return float(bdtrc(self.max_batch_size, rows, self.rate)) * (1 + 1e-9)


@functools.lru_cache(maxsize=65536)
def decompose(event: Event) -> tuple[tuple[tuple[SampledGaussian | Truncation, int], ...], str]:
    """``(mechanisms with their counts, relation)`` whose composition bounds ``event``.

    Raises:
        UnsupportedEvent: no sound bound is known for some part of it; the message names the part.
    """
    relation = event.relation
    parts: dict[SampledGaussian | Truncation, int] = {}
    for mechanism, count in _walk(event, relation):
        parts[mechanism] = parts.get(mechanism, 0) + count
    return tuple(parts.items()), relation


def _walk(event: Event, relation: str) -> list[tuple[SampledGaussian | Truncation, int]]:
    sigma = combined_noise_multiplier(event)
    if sigma is not None:
        return [(SampledGaussian("none", 1.0, sigma, relation), 1)]
    if isinstance(event, Composed):
        return [item for part in event.events for item in _walk(part, relation)]
    if isinstance(event, SelfComposed):
        return [(mechanism, count * event.count) for mechanism, count in _walk(event.event, relation) if event.count]
    if isinstance(event, ShuffledEpoch):
        return [(SampledGaussian("none", 1.0, _inner_sigma(event, event.event), relation), 1)]
    if isinstance(event, (PoissonSampled, TruncatedPoisson)):
        sigma = _inner_sigma(event, event.event)
        rate = event.sample_rate
        sampled: list[tuple[SampledGaussian | Truncation, int]]
        sampled = [(SampledGaussian("none" if rate == 1 else "poisson", rate, sigma, relation), 1)]
        if isinstance(event, TruncatedPoisson):
            sampled.append((Truncation(rate, event.dataset_size, event.max_batch_size), 1))
        return sampled
    if isinstance(event, FixedSize):
        sigma = _inner_sigma(event, event.event)
        rate = event.batch_size / event.dataset_size
        return [(SampledGaussian("none" if rate == 1 else "fixed", rate, sigma, relation), 1)]
    raise UnsupportedEvent(f"No accountant here can bound {type(event).__name__}.")


def _inner_sigma(outer: Event, inner: Event) -> float:
    sigma = combined_noise_multiplier(inner)
    if sigma is None:
        raise UnsupportedEvent(
            f"{type(outer).__name__} can hold Gaussian, or Composed and SelfComposed of Gaussian (sums over the same "
            f"batch), not {_describe(inner)}; compose sampled events outside of it, or bound it with another library."
        )
    return sigma


def _describe(event: Event) -> str:
    if isinstance(event, (Composed, SelfComposed)):
        parts = event.events if isinstance(event, Composed) else (event.event,)
        return f"{type(event).__name__} of {', '.join(sorted({_describe(part) for part in parts}))}"
    return type(event).__name__


def gaussian_precision(mechanism: SampledGaussian, count: int, group_size: int) -> float:
    """μ² = count·(group_size·sensitivity/σ)² of an unsampled Gaussian (Dong, Roth, Su 2022)."""
    if mechanism.noise_multiplier == 0:
        return math.inf
    return count * (group_size * mechanism.sensitivity / mechanism.noise_multiplier) ** 2
