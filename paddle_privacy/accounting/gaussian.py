"""The unsampled Gaussian mechanism, in closed form (Balle & Wang 2018, Theorem 8)."""

from __future__ import annotations

import math

import numpy as np


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ) of N(0, 1) against N(μ, 1); exact for every ε >= 0, rounded up.

    ``mu`` is sensitivity over noise standard deviation, √Σ(1/σᵢ²) for a composition. Computed in logarithms, so that
    neither e^ε overflows nor δ = 1e-300 is lost.
    """
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    log_first = float(log_ndtr(mu / 2 - epsilon / mu))
    log_second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    first = math.exp(log_first)
    # The two terms cancel where μ is small; what their rounding can hide is added.
    rounding = 4.5e-16 * first * (1 + abs(log_first))
    return min(1.0, first * -float(np.expm1(min(0.0, log_second - log_first))) + rounding)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest ε >= 0 with ``gaussian_delta(mu, ε) <= delta``, rounded up (relative 1e-12)."""
    if mu == 0 or gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    if math.isinf(mu):
        return math.inf
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > delta:
        low, high = high, 2 * high
        if math.isinf(high):
            return math.inf
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if gaussian_delta(mu, middle) > delta:
            low = middle
        else:
            high = middle
    return high * (1 + 1e-12)
