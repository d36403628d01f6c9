"""Auditing with one training run: m canaries, each put into the training set by its own fair coin.

If training is (ε, δ)-DP for adding or removing one row, nobody who sees the model can guess many of the m
coins right. So a guesser who does refutes small ε:

- :func:`dp_p_value`: Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, Theorem 5.2;
- :func:`tradeoff_p_value_exceeds`: Mahloujifar, Melis, Chaudhuri, "Auditing f-Differential Privacy in One Run",
  ICML 2025, its numerical audit; sharper, because it uses the whole trade-off curve f.

Both need independent fair coins. A fixed half-and-half split is not that, and neither is reusing training rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from .intervals import binomial_tail, check_error

EPSILON_CAP = 100.0
"""Search limit; no feasible number of canaries supports a larger lower bound."""


@dataclass(frozen=True)
class OneRunBound:
    """A lower bound on ε from one run, with the guesses behind it."""

    epsilon: float
    """ε̂: true ε is at least this, with the stated confidence; 0 when the data show no leak."""
    delta: float
    confidence: float
    canaries: int
    guessed_in: int
    """The highest scores, guessed to have been trained on."""
    guessed_out: int
    """The lowest scores, guessed to have been left out."""
    correct: int
    choices_tried: int
    """Ways of splitting guesses and abstentions that were compared; the confidence is corrected for all of them."""
    curve: str
    """"dp" where ε̂ refutes (ε, δ)-DP itself; "gaussian" where it refutes μ-GDP and ε̂ is that curve's ε(δ)."""
    mu: float = math.nan
    """For "gaussian": the largest refuted μ."""


def dp_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Chance that an (ε, δ)-DP run lets anyone guess ``correct`` or more of ``guesses`` coins right.

    P[Binomial(r, q) >= v] + 2 m δ max_i P[v > Binomial(r, q) >= v - i] / i with q = e^ε / (1 + e^ε).
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"need 0 <= correct <= guesses <= canaries, got {correct}, {guesses}, {canaries}")
    q = float(special.expit(epsilon))
    tail = binomial_tail(correct, guesses, q)
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    counts = np.arange(correct - 1, -1, -1)
    log_mass = (
        special.gammaln(guesses + 1)
        - special.gammaln(counts + 1)
        - special.gammaln(guesses - counts + 1)
        + counts * math.log(q)
        + (guesses - counts) * float(special.log_expit(-epsilon))
    )
    below = np.cumsum(np.exp(log_mass)) / np.arange(1, correct + 1)
    return min(1.0, tail + 2 * canaries * delta * float(below.max()))


def tradeoff_p_value_exceeds(
    level: float, canaries: int, guesses: int, correct: int, tradeoff: Callable[[float], float]
) -> bool:
    """Whether an f-DP run can let anyone guess ``correct`` or more right with probability ``level``; False refutes f.

    Args:
        level: the probability of a false refutation.
        canaries, guesses, correct: m coins, of which r were guessed, v rightly.
        tradeoff: a symmetric f: false positive rate -> smallest possible false negative rate.

    With p_j the chance of exactly j right guesses, r_i = Σ_{j>=i} j p_j / m and h_i = Σ_{j>=i} (r-j) p_j / m, f-DP
    says f(h_{i-1}) <= 1 - r_i. Starting from P[>= v] = ``level`` one walks down to i = 0, where r_0 + h_0 = r/m
    must hold; passing that means that such a distribution cannot exist.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"need 0 <= correct <= guesses <= canaries, got {correct}, {guesses}, {canaries}")
    if guesses == 0:
        return True
    right = level * correct / canaries
    wrong = level * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        # f is its own inverse (symmetric), so h_i >= f(1 - r_{i+1}).
        more = max(wrong, tradeoff(1.0 - right))
        right += (more - wrong) * i / (guesses - i)
        wrong = more
        if right + wrong > guesses / canaries:
            return False
    return True


def gaussian_tradeoff(mu: float) -> Callable[[float], float]:
    """G_μ(α) = Φ(Φ⁻¹(1-α) - μ) (Dong, Roth, Su 2019, Definition 2.6)."""

    def tradeoff(alpha: float) -> float:
        return float(special.ndtr(-special.ndtri(alpha) - mu))

    return tradeoff


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The ε for which μ-GDP is exactly (ε, δ)-DP (Dong, Roth, Su 2019, Corollary 2.13); 0 where δ alone covers it."""
    if mu <= 0:
        return 0.0

    def excess(epsilon: float) -> float:
        first = float(special.ndtr(-epsilon / mu + mu / 2))
        return first - math.exp(epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2))) - delta

    if excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, 1.0
    while excess(high) > 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


def guess_choices(canaries: int) -> list[tuple[int, int]]:
    """(guessed in, guessed out) to try, fixed before looking: the m/2, m/4, … m/32 highest and as many lowest."""
    choices = [(size, size) for size in (canaries // 2**k for k in range(1, 6)) if size >= 8]
    return choices or [(canaries // 2, canaries // 2)]


def one_run_bound(
    scores: ArrayLike,
    included: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    choices: list[tuple[int, int]] | None = None,
    curve: Literal["dp", "gaussian"] = "dp",
) -> OneRunBound:
    """ε̂ from one run: the best of several guessing rules, corrected for having chosen it (Bonferroni).

    Args:
        scores: [m] larger means "was trained on". May depend on the model and on the canaries, not on the coins.
        included: [m] bool, the coins.
        delta: δ of the claim under test.
        confidence: chance that ε̂ does not exceed the true ε.
        choices: (number guessed in, number guessed out) pairs, fixed beforehand; :func:`guess_choices` by default.
        curve: "dp" refutes (ε, δ)-DP. "gaussian" refutes μ-GDP; its ε̂ speaks about Gaussian-like mechanisms only.

    Ties in the scores are broken by position; canaries must therefore not be ordered by their coins.
    """
    values, coins = _scores_and_coins(scores, included)
    check_error("confidence", confidence)
    if curve not in ("dp", "gaussian"):
        raise ValueError(f"curve is {curve!r}; it must be 'dp' or 'gaussian'")
    if not 0 <= delta < 1:
        raise ValueError(f"delta is {delta}; it must lie in [0, 1)")
    count = len(values)
    tried = guess_choices(count) if choices is None else list(choices)
    for guessed_in, guessed_out in tried:
        if guessed_in < 0 or guessed_out < 0 or not 0 < guessed_in + guessed_out <= count:
            raise ValueError(f"choices holds {(guessed_in, guessed_out)}, which does not fit {count} canaries")
    error = (1 - confidence) / len(tried)
    ranked = coins[np.argsort(-values, kind="stable")]
    best = OneRunBound(0.0, delta, confidence, count, *tried[0], _correct(ranked, *tried[0]), len(tried), curve, 0.0)
    for guessed_in, guessed_out in tried:
        correct = _correct(ranked, guessed_in, guessed_out)
        guesses = guessed_in + guessed_out
        if correct * 2 <= guesses:
            continue
        mu = math.nan
        if curve == "dp":
            epsilon = _largest_refuted(lambda e: dp_p_value(count, guesses, correct, e, delta) <= error)  # noqa: B023
        else:
            mu = _largest_refuted(
                lambda m: not tradeoff_p_value_exceeds(error, count, guesses, correct, gaussian_tradeoff(m))  # noqa: B023
            )
            epsilon = gaussian_epsilon(mu, delta)
        if epsilon > best.epsilon or (curve == "gaussian" and mu > best.mu):
            best = OneRunBound(
                epsilon, delta, confidence, count, guessed_in, guessed_out, correct, len(tried), curve, mu
            )
    return best


def _correct(ranked: np.ndarray, guessed_in: int, guessed_out: int) -> int:
    """Right guesses when the first ``guessed_in`` are called in, the last ``guessed_out`` out."""
    return int(ranked[:guessed_in].sum() + (~ranked[len(ranked) - guessed_out :]).sum())


def _largest_refuted(refuted: Callable[[float], bool]) -> float:
    """Largest value that is refuted, from below; 0 where not even 0 is."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
        if high > EPSILON_CAP:
            return low
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _scores_and_coins(scores: ArrayLike, included: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(scores, dtype=np.float64)
    coins = np.asarray(included)
    if values.ndim != 1 or values.shape != coins.shape or not len(values):
        raise ValueError(f"scores and included must be equally long vectors, got {values.shape} and {coins.shape}")
    if coins.dtype != np.bool_:
        raise TypeError(f"included must be a boolean vector, got {coins.dtype}")
    if np.isnan(values).any():
        raise ValueError(f"scores holds {int(np.isnan(values).sum())} NaN; a canary without a score cannot be guessed")
    return values, coins
