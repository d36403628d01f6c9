"""Confidence bounds that hold for every sample size, for probabilities and for ROC areas."""

from __future__ import annotations

import math

from scipy import special


def lower_limit(successes: int, trials: int, error: float) -> float:
    """Clopper–Pearson: below the true probability except with chance ``error``."""
    if successes == 0:
        return 0.0
    return float(special.betaincinv(successes, trials - successes + 1, error))


def upper_limit(successes: int, trials: int, error: float) -> float:
    """Clopper–Pearson: above the true probability except with chance ``error``."""
    if successes == trials:
        return 1.0
    return float(special.betaincinv(successes + 1, trials - successes, 1 - error))


def auc_interval(auc: float, members: int, nonmembers: int, error: float) -> tuple[float, float]:
    """Two-sided interval for the area under the ROC curve (Hoeffding 1963, inequality for two-sample U-statistics).

    Wider than DeLong's, and unlike DeLong's true at every sample size.
    """
    reach = math.sqrt(math.log(2 / error) / (2 * min(members, nonmembers)))
    return max(0.0, auc - reach), min(1.0, auc + reach)


def binomial_tail(at_least: int, trials: int, probability: float) -> float:
    """P[Binomial(trials, probability) >= at_least]."""
    if at_least <= 0:
        return 1.0
    if at_least > trials:
        return 0.0
    return float(special.betainc(at_least, trials - at_least + 1, probability))


def check_error(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} is {value}; it must lie strictly between 0 and 1")
