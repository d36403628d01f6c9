"""Where batches come from: Poisson draws, what was emitted of them, and what a given loader really does."""

from __future__ import annotations

from paddle_privacy.sampling.detect import SamplingScheme, detect_sampling, find_live_loader, live_iterators
from paddle_privacy.sampling.emissions import Emission, Emissions
from paddle_privacy.sampling.loader import PoissonDataLoader
from paddle_privacy.sampling.passes import PassCounter
from paddle_privacy.sampling.poisson import PoissonBatchSampler

__all__ = [
    "Emission",
    "Emissions",
    "PassCounter",
    "PoissonBatchSampler",
    "PoissonDataLoader",
    "SamplingScheme",
    "detect_sampling",
    "find_live_loader",
    "live_iterators",
]
