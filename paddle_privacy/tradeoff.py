"""What (ε, δ) means for an attacker: the trade-off curve and the largest hit rate it allows.

Any test for "was this row trained on?" with false positive rate α has a true positive rate of at most
min over ε of e^ε α + δ(ε), and of at most 1 - e^{-ε}(1 - δ(ε) - α) (Kairouz, Oh, Viswanath 2015; Dong, Roth, Su 2022,
Proposition 2.5). δ(ε) comes from an accountant, so the limit is as tight as the accountant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .accounting.accountant import Accountant

_EPSILONS = np.concatenate([[0.0], np.geomspace(0.01, 40.0, 127)])


def max_true_positive_rate(
    accountant: Accountant, false_positive_rates: Sequence[float], group_size: int = 1
) -> np.ndarray:
    """The largest true positive rate of any membership attack at each false positive rate, shape [len(rates)].

    Every ε gives a valid limit. e^ε α + δ(ε) is convex in e^ε, so the best ε of a fine grid is found by halving.

    Raises:
        ValueError: a rate outside [0, 1].
    """
    rates = np.asarray(list(false_positive_rates), dtype=np.float64)
    if ((rates < 0) | (rates > 1)).any():
        raise ValueError(f"false_positive_rates must lie in [0, 1], got {rates.tolist()}")
    deltas: dict[int, float] = {}

    def limit(index: int, rate: float) -> float:
        if index not in deltas:
            deltas[index] = accountant.get_delta(float(_EPSILONS[index]), group_size)
        return math.exp(_EPSILONS[index]) * rate + deltas[index]

    for rate in rates:
        low, high = 0, len(_EPSILONS) - 1
        while high > low:
            middle = (low + high) // 2
            low, high = (low, middle) if limit(middle, rate) <= limit(middle + 1, rate) else (middle + 1, high)
    epsilon = _EPSILONS[list(deltas)][:, None]
    delta = np.asarray(list(deltas.values()))[:, None]
    hit = np.minimum(np.exp(epsilon) * rates + delta, 1 - (1 - delta - rates) * np.exp(-epsilon))
    return np.clip(hit.min(axis=0), rates, 1.0)


def posterior_belief(epsilon: float, prior: float = 0.5) -> float:
    """How sure an attacker can become (up to δ) that a row was trained on, having started at ``prior``."""
    if not 0 < prior < 1:
        raise ValueError(f"prior is {prior}; it must lie strictly between 0 and 1")
    odds = math.log(prior) - math.log1p(-prior) + epsilon
    return 1 / (1 + math.exp(-odds)) if odds < 700 else 1.0
