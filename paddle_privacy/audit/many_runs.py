"""ε̂ from independent scores of members and non-members, such as one canary scored on many independent runs.

(ε, δ)-DP bounds every test: TPR <= e^ε FPR + δ, and the same with the roles exchanged (Kairouz, Oh, Viswanath 2015).
The popular estimator takes the threshold that looks best and then an interval at that threshold as if it had been
chosen beforehand: on scores without any leak it reports ε̂ > 0 far more often than its level. Here every
threshold has a number fixed beforehand (its rank among one group's scores), the rate of that group beyond
an order statistic is bounded by its exact Beta law, the other group's rate given that threshold is binomial,
and the error is shared between all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from .intervals import check_error, lower_limit, upper_limit


@dataclass(frozen=True)
class ScoreBound:
    """A lower bound on ε with the test behind it."""

    epsilon: float
    """ε̂: true ε is at least this, with the stated confidence; 0 when the scores show no leak."""
    delta: float
    confidence: float
    threshold: float
    side: str
    """"high": scores above the threshold are called members; "low": scores below are called non-members."""
    true_rate: float
    """Lower limit of the rate at which the side's own group is called so."""
    false_rate: float
    """Upper limit of the rate at which the other group is called so."""
    thresholds_tried: int


def ranks_to_try(count: int) -> list[int]:
    """How many of the other group lie beyond the threshold: 0, 1, 2, 3, 4, 6, 8, 12, … up to half, fixed beforehand."""
    ranks, size = [0], 1
    while size <= count // 2:
        ranks += [size] if size < 2 or size * 3 // 2 > count // 2 else [size, size * 3 // 2]
        size *= 2
    return ranks


def score_bound(
    member_scores: ArrayLike,
    nonmember_scores: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    selection: Literal["ranks", "split"] = "ranks",
    seed: int = 0,
) -> ScoreBound:
    """ε̂ from scores drawn independently with and without the row.

    Args:
        member_scores: [n] larger means "was trained on"; independent draws.
        nonmember_scores: [k] the same from runs without the row.
        delta: δ of the claim under test.
        confidence: chance that ε̂ does not exceed the true ε.
        selection: "ranks" corrects over all thresholds tried; "split" chooses on a random half, measures on the rest.
        seed: of the split.

    Scores of many rows on *one* model are not independent draws: for those use
    :func:`paddle_privacy.audit.one_run_bound`.
    """
    members, others = _clean("member_scores", member_scores), _clean("nonmember_scores", nonmember_scores)
    check_error("confidence", confidence)
    if not 0 <= delta < 1:
        raise ValueError(f"delta is {delta}; it must lie in [0, 1)")
    if selection == "ranks":
        return _by_ranks(members, others, delta, confidence)
    if selection == "split":
        return _by_split(members, others, delta, confidence, seed)
    raise ValueError(f"selection is {selection!r}; it must be 'ranks' or 'split'")


def _by_ranks(members: np.ndarray, others: np.ndarray, delta: float, confidence: float) -> ScoreBound:
    # "low" is "high" on negated scores with the groups exchanged.
    sides = (("high", members, others, 1.0), ("low", -others, -members, -1.0))
    tried = sum(len(ranks_to_try(len(false_group))) for _, _, false_group, _ in sides)
    error = (1 - confidence) / (2 * tried)
    best = ScoreBound(0.0, delta, confidence, math.nan, "high", 0.0, 1.0, tried)
    for side, true_group, false_group, sign in sides:
        ordered = np.sort(false_group)[::-1]
        count = len(ordered)
        for rank in ranks_to_try(count):
            threshold = ordered[rank]
            hits = int((true_group > threshold).sum())
            true_rate = lower_limit(hits, len(true_group), error)
            # P[score > X_(rank+1 from above)] is at most Beta(rank + 1, count - rank), with equality without ties.
            false_rate = float(special.betaincinv(rank + 1, count - rank, 1 - error))
            epsilon = _epsilon(true_rate, false_rate, delta)
            if epsilon > best.epsilon:
                best = ScoreBound(
                    epsilon, delta, confidence, float(sign * threshold), side, true_rate, false_rate, tried
                )
    return best


def _by_split(members: np.ndarray, others: np.ndarray, delta: float, confidence: float, seed: int) -> ScoreBound:
    generator = np.random.default_rng(seed)
    first_m, second_m = _halves(members, generator)
    first_o, second_o = _halves(others, generator)
    error = (1 - confidence) / 2
    chosen = _most_promising(first_m, first_o, delta, error)
    if chosen is None:
        return ScoreBound(0.0, delta, confidence, math.nan, "high", 0.0, 1.0, 1)
    side, threshold = chosen
    true_rate, false_rate = _limits(side, threshold, second_m, second_o, error)
    epsilon = _epsilon(true_rate, false_rate, delta)
    return ScoreBound(epsilon, delta, confidence, threshold, side, true_rate, false_rate, 1)


def _most_promising(members: np.ndarray, others: np.ndarray, delta: float, error: float) -> tuple[str, float] | None:
    best, found = 0.0, None
    for threshold in np.unique(np.concatenate([members, others])):
        for side in ("high", "low"):
            epsilon = _epsilon(*_limits(side, threshold, members, others, error), delta)
            if epsilon > best:
                best, found = epsilon, (side, float(threshold))
    return found


def _limits(side: str, threshold: float, members: np.ndarray, others: np.ndarray, error: float) -> tuple[float, float]:
    if side == "high":
        true_hits, false_hits = int((members > threshold).sum()), int((others > threshold).sum())
        return lower_limit(true_hits, len(members), error), upper_limit(false_hits, len(others), error)
    true_hits, false_hits = int((others < threshold).sum()), int((members < threshold).sum())
    return lower_limit(true_hits, len(others), error), upper_limit(false_hits, len(members), error)


def _epsilon(true_rate: float, false_rate: float, delta: float) -> float:
    """The ε below which TPR <= e^ε FPR + δ fails."""
    if true_rate <= delta or true_rate - delta <= false_rate:
        return 0.0
    return math.log((true_rate - delta) / false_rate)


def _halves(values: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    shuffled = generator.permutation(values)
    return shuffled[: len(values) // 2], shuffled[len(values) // 2 :]


def _clean(name: str, scores: ArrayLike) -> np.ndarray:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or len(values) < 4:
        raise ValueError(f"{name} must be a vector of at least 4 scores, got shape {values.shape}")
    if np.isnan(values).any():
        raise ValueError(f"{name} holds {int(np.isnan(values).sum())} NaN; leave those runs out on both sides")
    return values
