"""Dominating pairs: for each mechanism, the two distributions on a line that are hardest to tell apart.

If δ(ε) of (P, Q) is at least that of the mechanism on every pair of neighbours, for every ε in ℝ, then (P, Q)
dominates, and adaptive compositions are dominated by products of dominating pairs (Zhu, Dong, Wang 2022, Theorem 10).
Below, distances are in units of C, noise is N(0, σ²), and v is the (clipped) row that differs, |v| <= 1. The sum of
the other rows of the batch is a constant that may be subtracted (joint convexity of the hockey-stick divergence).

``none``, sensitivity s
    (N(s, σ²), N(0, σ²)); with k rows k·s.
``poisson``, add-or-remove-one and zero-out
    ((1-q)N(0) + qN(1), N(0)) and its reverse (Zhu, Dong, Wang 2022, Theorem 11); with k rows the mixture over
    Binomial(k, q) of N(j) (Ganesh 2024, "Tight group-level DP guarantees"; rows may share a batch, so k·ε is not it).
``poisson``, replace-one
    P = (1-q)N(0) + qN(v) against Q = (1-q)N(0) + qN(v'). The best test accepts S = {q·a(x) - αq·b(x) >= (α-1)(1-q)}
    where a, b are the likelihood ratios of v, v' to 0, so S grows with <x, v> and shrinks with <x, v'>. Turning v'
    away from v, and stretching v' or v once they are opposite, moves the mean of N(v') where 1_S falls (of N(v) where
    it grows), so the divergence only rises; it is largest at v' = -v, |v| = 1, for every α at once. Hence
    ((1-q)N(0) + qN(1), (1-q)N(0) + qN(-1)).
``fixed`` (B of N rows without replacement, γ = B/N), replace-one
    Couple the batches without the row to those with it by exchanging one row w. For α >= 1 advanced joint convexity
    (Balle, Barthe, Gaboardi 2018, Theorem 2) gives γ·H_α'(N(v) ‖ (1-β)N(w) + βN(v')), largest at w = v' = -v:
    ((1-γ)N(0) + γN(2), N(0)) for losses > 0, and its reverse for losses < 0 (H_α(P‖Q) = 1 - α + αH_{1/α}(Q‖P)).
``fixed``, zero-out
    The same with v' = 0. Row present against absent: w = -v is worst, ((1-γ)N(-1) + γN(1), (1-γ)N(-1) + γN(0));
    absent against present: w = v, ((1-γ)N(0) + γN(1), N(0)). Each serves losses > 0 of its own direction and, reversed,
    losses < 0 of the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import UnsupportedEvent
from .mechanism import SampledGaussian

Mixture = tuple[tuple[float, float], ...]  # (weight, mean), ...


@dataclass(frozen=True)
class Branch:
    """Two Gaussian mixtures with a common ``sigma`` whose log-ratio rises with x on (``start``, ``stop``)."""

    p: Mixture
    q: Mixture
    sigma: float
    start: float = -math.inf
    stop: float = math.inf

    def loss(self, x: np.ndarray) -> np.ndarray:
        """log p(x)/q(x)."""
        return _log_density(self.p, self.sigma, x) - _log_density(self.q, self.sigma, x)

    def log_q(self, x: np.ndarray) -> np.ndarray:
        """log q(x)."""
        log_base = -x * x / (2 * self.sigma**2) - math.log(self.sigma * math.sqrt(2 * math.pi))
        return log_base + _log_density(self.q, self.sigma, x)

    def position(self, loss: np.ndarray) -> np.ndarray:
        """x with ``self.loss(x) == loss``, clipped to [start, stop] (±inf where the loss is out of reach)."""
        closed = self._closed_form(loss)
        return np.clip(self._search(loss) if closed is None else closed, self.start, self.stop)

    def _closed_form(self, loss: np.ndarray) -> np.ndarray | None:
        variance = self.sigma**2
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if len(self.p) == len(self.q) == 1:
                gap = self.p[0][1] - self.q[0][1]
                return loss * variance / gap + (self.p[0][1] + self.q[0][1]) / 2
            if len(self.p) == 2 and self.q == ((1.0, 0.0),) and self.p[0][1] == 0:
                rate, mean = self.p[1]
                return variance / mean * _log1p_scaled(loss, rate) + mean / 2
            if len(self.q) == 2 and self.p == ((1.0, 0.0),) and self.q[0][1] == 0:
                rate, mean = self.q[1]
                return variance / mean * _log1p_scaled(-loss, rate) + mean / 2
        return None

    def _search(self, loss: np.ndarray) -> np.ndarray:
        reach = 40 * self.sigma
        means = [mean for _, mean in self.p + self.q]
        low = max(self.start, min(means) - reach - float(np.max(np.abs(loss), initial=0.0)) * self.sigma**2)
        high = min(self.stop, max(means) + reach + float(np.max(np.abs(loss), initial=0.0)) * self.sigma**2)
        table = np.linspace(low, high, 4097)
        values = np.maximum.accumulate(self.loss(table))
        index = np.clip(np.searchsorted(values, loss), 1, table.size - 1)
        left, right = table[index - 1], table[index]
        outside = (loss <= values[0]) | (loss >= values[-1])
        with np.errstate(divide="ignore", invalid="ignore"):
            share = (loss - values[index - 1]) / (values[index] - values[index - 1])
        x = left + (right - left) * np.clip(np.nan_to_num(share, nan=0.5), 0.0, 1.0)
        for iteration in range(60):
            residual = self.loss(x) - loss
            left, right = np.where(residual < 0, x, left), np.where(residual < 0, right, x)
            near = (np.abs(residual) < 1e-13 * (1 + np.abs(loss))) | (right - left <= 1e-15 * np.abs(right))
            if np.all(near | outside):
                break
            with np.errstate(divide="ignore", invalid="ignore"):
                newton = x - residual / self._slope(x)
            inside = (newton > left) & (newton < right) & (iteration % 8 != 7)
            x = np.where(inside, newton, (left + right) / 2)
        x = np.where(loss <= values[0], -math.inf, x)
        return np.where(loss >= values[-1], math.inf, x)

    def _slope(self, x: np.ndarray) -> np.ndarray:
        return (_mean_of(self.p, self.sigma, x) - _mean_of(self.q, self.sigma, x)) / self.sigma**2

    def hockey_stick(self, epsilon: float) -> tuple[float, float]:
        """P[loss > ε] - e^ε Q[loss > ε], and a bound on its rounding error; ε must be a loss of this branch."""
        from scipy.special import ndtr

        x = float(self.position(np.array([epsilon]))[0])
        excess: dict[float, float] = {}
        for weight, mean in self.p:
            excess[mean] = excess.get(mean, 0.0) + weight
        for weight, mean in self.q:
            # e^ε = 1 + (e^ε - 1), so that equal weights cancel before anything is rounded.
            excess[mean] = (excess.get(mean, 0.0) - weight) - weight * math.expm1(epsilon)
        tails = {mean: float(ndtr((mean - x) / self.sigma)) for mean in excess}
        value = sum(excess[mean] * tail for mean, tail in tails.items())
        # Weights carry an error of one ulp of 1, products and tails a few ulp of themselves.
        error = 2.3e-16 * sum((1 + 8 * abs(excess[mean])) * tail for mean, tail in tails.items())
        return max(0.0, value), error

    def masses(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """P- and Q-probability between successive entries of ``x`` (rising, may be ±inf), shape [len(x) - 1]."""
        return _interval_masses(self.p, self.sigma, x), _interval_masses(self.q, self.sigma, x)


@dataclass(frozen=True)
class Pair:
    """A dominating pair: one branch on the whole line, or one for losses < 0 and then one for losses > 0.

    What the branches leave of either distribution is an atom at loss 0.
    """

    branches: tuple[Branch, ...]

    def delta(self, epsilon: float) -> float:
        """δ(ε) of a single use for ε >= 0: exact, rounded up."""
        value, error = self.branches[-1].hockey_stick(epsilon)
        return min(1.0, value + error)

    def delta_below(self, epsilon: float) -> float:
        """δ(ε) of a single use for ε >= 0: exact, rounded down."""
        value, error = self.branches[-1].hockey_stick(epsilon)
        return max(0.0, value - error)

    def atom(self) -> tuple[float, float]:
        """(P, Q) mass that lies at loss 0."""
        if len(self.branches) == 1:
            return 0.0, 0.0
        inside = [branch.masses(np.array([branch.start, branch.stop])) for branch in self.branches]
        return max(0.0, 1 - sum(float(p[0]) for p, _ in inside)), max(0.0, 1 - sum(float(q[0]) for _, q in inside))


def dominating_pairs(mechanism: SampledGaussian, group_size: int = 1) -> tuple[Pair, ...]:
    """The pairs of ``mechanism``, as ``(removal, addition)``; a single one where both directions are alike.

    Raises:
        UnsupportedEvent: no pair is known for this group size.
    """
    sigma, rate = mechanism.noise_multiplier, mechanism.rate
    if mechanism.sampling == "none":
        return (Pair((Branch(((1.0, group_size * mechanism.sensitivity),), ((1.0, 0.0),), sigma),)),)
    zero: Mixture = ((1.0, 0.0),)
    if group_size > 1 and (mechanism.sampling == "fixed" or mechanism.relation == "replace_one"):
        raise UnsupportedEvent(
            f"group_size={group_size} is bounded for Poisson sampling under add_or_remove_one or zero_out and for "
            f"events without sampling, not for {mechanism.sampling} sampling under {mechanism.relation}; ask for "
            "group_size=1."
        )
    if mechanism.sampling == "poisson":
        if mechanism.relation == "replace_one":
            return (Pair((Branch(((1 - rate, 0.0), (rate, 1.0)), ((1 - rate, 0.0), (rate, -1.0)), sigma),)),)
        up = _binomial(group_size, rate)
        down = tuple((weight, -mean) for weight, mean in up)
        return Pair((Branch(up, zero, sigma),)), Pair((Branch(zero, down, sigma),))
    keep = 1 - rate
    if mechanism.relation == "replace_one":
        rises = Branch(((keep, 0.0), (rate, 2.0)), zero, sigma, start=1.0)
        falls = Branch(zero, ((keep, 0.0), (rate, -2.0)), sigma, stop=-1.0)
        return (Pair((falls, rises)),)
    present = Branch(((keep, -1.0), (rate, 1.0)), ((keep, -1.0), (rate, 0.0)), sigma, start=0.5)
    absent = Branch(((keep, 0.0), (rate, 1.0)), zero, sigma, start=0.5)
    return Pair((_reversed(absent), present)), Pair((_reversed(present), absent))


def _reversed(branch: Branch) -> Branch:
    """The same two distributions with their roles exchanged, mirrored so that the loss rises with x again."""
    p = tuple((weight, -mean) for weight, mean in branch.q)
    q = tuple((weight, -mean) for weight, mean in branch.p)
    return Branch(p, q, branch.sigma, start=-branch.stop, stop=-branch.start)


def _binomial(size: int, rate: float) -> Mixture:
    from scipy.special import gammaln

    j = np.arange(size + 1)
    log_weight = gammaln(size + 1) - gammaln(j + 1) - gammaln(size - j + 1) + j * math.log(rate)
    weight = np.exp(log_weight + (size - j) * math.log1p(-rate))
    return tuple((float(w), float(mean)) for w, mean in zip(weight / weight.sum(), j))


def _log_density(mixture: Mixture, sigma: float, x: np.ndarray) -> np.ndarray:
    """log of the mixture's density, up to the term that every component shares."""
    out = np.full(np.shape(x), -math.inf)
    for weight, mean in mixture:
        if weight > 0:
            out = np.logaddexp(out, math.log(weight) + (2 * mean * x - mean * mean) / (2 * sigma**2))
    return out


def _mean_of(mixture: Mixture, sigma: float, x: np.ndarray) -> np.ndarray:
    total = _log_density(mixture, sigma, x)
    out = np.zeros(np.shape(x))
    for weight, mean in mixture:
        if weight > 0 and mean != 0:
            log_term = math.log(weight) + (2 * mean * x - mean * mean) / (2 * sigma**2)
            out = out + mean * np.exp(np.minimum(log_term - total, 0.0))
    return out


def _interval_masses(mixture: Mixture, sigma: float, x: np.ndarray) -> np.ndarray:
    from scipy.special import ndtr

    out = np.zeros(x.size - 1)
    for weight, mean in mixture:
        z = (x - mean) / sigma
        # Differences of the nearer tail keep relative precision on both sides.
        tail = ndtr(-np.abs(z))
        crossing = np.clip(np.searchsorted(z, 0.0), 0, z.size)
        piece = np.abs(np.diff(tail))
        if 0 < crossing < z.size:
            piece[crossing - 1] = 1 - tail[crossing - 1] - tail[crossing]
        out += weight * piece
    return out


def _log1p_scaled(loss: np.ndarray, rate: float) -> np.ndarray:
    """log(1 + (e^loss - 1)/rate), -inf where that is not positive; e^loss may overflow."""
    loss = np.asarray(loss, dtype=np.float64)
    moderate = np.log1p(np.maximum(np.expm1(np.minimum(loss, 500.0)) / rate, -1.0))
    return np.where(loss > 500, loss - math.log(rate), moderate)
