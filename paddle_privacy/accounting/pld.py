"""Privacy loss distributions on a grid, composed by a tilted Fourier transform, with bounds on every error.

The privacy loss of (P, Q) is log p/q under P. Losses of composed mechanisms add, so the distribution of the sum is a
convolution, and δ(ε) = E[(1 - e^{ε-S})₊] + P[S = ∞].

*Pessimistic* grid: the probability of a loss interval [εᵢ, εᵢ₊₁] is split between its ends so that both its P- and its
Q-mass are kept ("connect the dots", Doroshenko et al. 2022): the hockey-stick curve of the discrete pair
is the chord of the true one, never below it. *Optimistic* grid: outcomes around a grid point are merged into one that
has exactly its loss (post-processing).

*Tilting*: the convolution is done on e^{θs}·f(s) with θ near the saddle point of the tail in question, so that
relative precision, not absolute 1e-16, is what the transform keeps; δ = 1e-15 costs no more than 1e-5. The window is
a few standard deviations of the tilted sum, not its mean: sums wrap around (they are computed modulo the window), and
what wrapping could hide is bounded by Chernoff and added. Rounding of the transform is bounded and added too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .pairs import Pair

MAX_POINTS = 1 << 19
# ε may be widened by this much by cutting tails off, and a loss this far above ε is as bad as ∞.
_CUT = 1e-6
_BEYOND = 14.0
_ROUNDING = 2.3e-16


@dataclass(frozen=True)
class Sketch:
    """A coarse, non-uniform version of one loss distribution: good for choosing tilt, spacing and window only."""

    losses: np.ndarray
    log_mass: np.ndarray

    def moments(self, theta: float) -> tuple[float, float, float]:
        """Cumulant generating function of the loss at ``theta``, and its first two derivatives."""
        terms = self.log_mass + theta * self.losses
        peak = terms.max()
        weight = np.exp(terms - peak)
        total = weight.sum()
        mean = float((weight * self.losses).sum() / total)
        return float(peak + math.log(total)), mean, float((weight * (self.losses - mean) ** 2).sum() / total)

    def below(self, cap: float) -> Sketch:
        """Without the losses above ``cap``."""
        kept = self.losses <= cap
        return self if kept.all() or not kept.any() else Sketch(self.losses[kept], self.log_mass[kept])

    def log_moments(self, thetas: np.ndarray) -> np.ndarray:
        terms = self.log_mass + thetas[:, None] * self.losses
        peak = terms.max(axis=1, keepdims=True)
        return peak[:, 0] + np.log(np.exp(terms - peak).sum(axis=1))


@functools.lru_cache(maxsize=512)
def sketch(pair: Pair, log_tail: float) -> Sketch:
    """About 800 outcomes of ``pair``; P-tails below e^``log_tail`` are left out."""
    from scipy.special import ndtri_exp

    losses: list[np.ndarray] = []
    masses: list[np.ndarray] = []
    for branch in pair.branches:
        reach = -float(ndtri_exp(log_tail)) * branch.sigma
        means = [mean for _, mean in branch.p]
        low, high = max(branch.start, min(means) - reach), min(branch.stop, max(means) + reach)
        if high <= low:
            continue
        x = np.linspace(low, high, 800)
        p, q = branch.masses(x)
        seen = (p > 0) & (q > 0)
        losses.append(np.where(seen, np.log(np.where(seen, p, 1.0)) - np.log(np.where(seen, q, 1.0)), 0.0)[seen])
        masses.append(p[seen])
    p0, q0 = pair.atom()
    if p0 > 0:
        losses.append(np.zeros(1))
        masses.append(np.array([p0]))
    return Sketch(np.concatenate(losses), np.log(np.concatenate(masses)))


@dataclass(frozen=True)
class GridLoss:
    """P-mass ``mass[j]`` at loss offset + (first + j)·spacing, and ``infinite`` at loss ∞."""

    first: int
    mass: np.ndarray
    infinite: float
    offset: float


def pessimistic_grid(pair: Pair, spacing: float, first: int, last: int, offset: float = 0.0) -> GridLoss:
    """``pair`` on the losses offset + first·spacing … offset + last·spacing, never below it.

    Mass below the grid goes up to its first point, mass above to ∞.
    """
    edges = offset + np.arange(first, last + 1) * spacing
    p, q, below, above = _interval_masses(pair, edges)
    # Keeping both masses: w₁ + w₂ = p and w₁ + w₂·e^{-spacing} = q·e^{edge}. The last term covers rounding in q and p.
    with np.errstate(over="ignore", invalid="ignore"):
        upper = (p - q * np.exp(edges[:-1])) / -math.expm1(-spacing)
    upper = np.where(np.isfinite(upper), upper, p) + 4 * _ROUNDING * p / spacing
    upper = np.clip(upper, 0.0, p)
    mass = np.zeros(edges.size)
    mass[:-1] += p - upper
    mass[1:] += upper
    mass[0] += below
    p0, _ = pair.atom()
    if p0 > 0:
        mass[min(max(-first, 0), mass.size - 1)] += p0
    return GridLoss(first, mass, above, offset)


def optimistic_grid(pair: Pair, spacing: float, first: int, last: int, offset: float = 0.0) -> GridLoss:
    """``pair`` on the same losses, never above it: mass below the grid is dropped, mass above comes down to its end.

    Each grid point takes a share of the interval on its left and a share of the one on its right, such that together
    they have exactly its likelihood ratio: a randomised merging of outcomes, which can only lose information.
    """
    edges = offset + np.arange(first, last + 1) * spacing
    p, q, _, above = _interval_masses(pair, edges)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio_low = q * np.exp(edges[:-1])
        excess = np.nan_to_num(np.maximum(p - ratio_low, 0.0)).tolist()
        lack = np.nan_to_num(np.maximum(ratio_low * math.exp(spacing) - p, 0.0)).tolist()
    masses = p.tolist()
    out = [0.0] * edges.size
    taken = 0.0  # share of interval j - 1 that went to its left end
    for j in range(1, len(masses)):
        left = (1 - taken) * lack[j - 1]
        if left <= excess[j]:
            share = left / excess[j] if excess[j] > 0 else 0.0
            used = 1 - taken
        else:
            # Not enough on the right to make up for it: what is left over comes down to the next lower point.
            share, used = 1.0, excess[j] / lack[j - 1]
            out[j - 1] += (1 - taken - used) * masses[j - 1]
        out[j] += used * masses[j - 1] + share * masses[j]
        taken = share
    out[-2] += (1 - taken) * masses[-1]
    out[-1] += above
    p0, _ = pair.atom()
    if first <= 0 <= last:
        out[-first] += p0
    return GridLoss(first, np.asarray(out), 0.0, offset)


def _interval_masses(pair: Pair, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, float]:
    """P- and Q-mass of the losses between successive ``edges``, and the P-mass below and above them all."""
    p_total, q_total = np.zeros(edges.size - 1), np.zeros(edges.size - 1)
    below = above = 0.0
    for branch in pair.branches:
        x = np.concatenate([[branch.start], branch.position(edges), [branch.stop]])
        p, q = branch.masses(x)
        p_total += p[1:-1]
        q_total += q[1:-1]
        below += float(p[0])
        above += float(p[-1])
    return p_total, q_total, below, above


@dataclass(frozen=True)
class Plan:
    """How to compute one composition: the tilt, the grid spacing and the window of sums."""

    theta: float
    spacing: float
    mean: float
    bottom: float
    top: float


class Composition:
    """n₁ times pair 1, n₂ times pair 2, …: δ(ε) and ε(δ) with proven direction.

    ``pessimistic=True`` bounds the truth from above, False from below.
    """

    def __init__(self, parts: Sequence[tuple[Pair, int]], pessimistic: bool = True, tolerance: float = 4e-5) -> None:
        self.parts = [(pair, count) for pair, count in parts if count > 0]
        self.count = sum(count for _, count in self.parts)
        self.pessimistic = pessimistic
        self.tolerance = tolerance

    def epsilon(self, delta: float) -> float:
        """Bound on the smallest ε >= 0 with δ(ε) <= ``delta``."""
        if self.total_variation() <= delta or not self.parts:
            return 0.0
        if self.count == 1:
            return self._single_epsilon(delta)
        log_delta = math.log(delta)
        theta, guess = self._tilt_for_delta(log_delta)
        best = math.inf if self.pessimistic else 0.0
        better = min if self.pessimistic else max
        for attempt in range(4):
            # A loss beyond ε + 14 may count as ∞ unless such losses make up most of δ.
            tail = self._tail(theta, log_delta, guess + 40 * attempt if math.isinf(best) else guess)
            epsilon = tail.epsilon(delta)
            best = better(best, epsilon)
            if tail.covers(epsilon):
                break
            if math.isfinite(epsilon):
                guess = max(epsilon, 0.0)
                theta, _ = self._tilt_for_epsilon(guess, log_delta)
        return max(0.0, best)

    def delta(self, epsilon: float) -> float:
        """Bound on δ(ε)."""
        if self.count <= 1:
            return sum(pair.delta(epsilon) if self.pessimistic else pair.delta_below(epsilon) for pair, _ in self.parts)
        best = self.total_variation() if self.pessimistic else 0.0
        # How much of the tails may be cut depends on δ itself: start with next to nothing cut, and settle.
        log_delta = -70.0
        for attempt in range(5):
            theta, bound = self._tilt_for_epsilon(epsilon, log_delta)
            value = self._tail(theta, bound if attempt == 0 else log_delta, epsilon).delta(epsilon)
            best = min(best, value) if self.pessimistic else max(best, value)
            settled = min(bound, math.log(value)) if value > 1e-300 else bound
            if attempt > 0 and abs(settled - log_delta) < 1:
                break
            log_delta = settled
        return best

    def total_variation(self) -> float:
        """An upper bound on δ(0): total variation distances add up at worst."""
        return min(1.0, sum(count * pair.delta(0.0) for pair, count in self.parts) * (1 + 1e-12))

    def _single_epsilon(self, delta: float) -> float:
        pair = self.parts[0][0]
        single = pair.delta if self.pessimistic else pair.delta_below
        low, high = 0.0, 1.0
        while single(high) > delta:
            low, high = high, 2 * high
            if high > 1e300:
                return math.inf
        while high - low > 1e-13 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if single(middle) > delta else (low, middle)
        return high * (1 + 1e-10) if self.pessimistic else low * (1 - 1e-10)

    def _sketches(self, theta: float, log_delta: float, cap: float) -> list[tuple[Sketch, int]]:
        log_tail = self._log_tail(theta, log_delta)
        return [(sketch(pair, log_tail).below(cap), count) for pair, count in self.parts]

    def _log_tail(self, theta: float, log_delta: float) -> float:
        """log of the P-mass that may be cut off each end of each loss distribution."""
        # δ falls like e^{-θε}: a relative excess of θ·_CUT in δ costs _CUT in ε. Rounded so that sketches are shared.
        log_tail = log_delta + math.log(min(1e-3, _CUT * theta)) - math.log(2 * self.count)
        return 2.0 * math.floor(log_tail / 2)

    def _tilt_for_delta(self, log_delta: float) -> tuple[float, float]:
        """``(θ, ε)``: the order, less one, of the best Rényi bound on ε, and that bound."""
        theta, epsilon = 1.0, math.inf
        for _ in range(3):
            sketches = self._sketches(theta, log_delta, epsilon + _BEYOND)
            theta, epsilon = _minimise_over_theta(sketches, lambda moments, thetas: (moments - log_delta) / thetas)
        return theta, epsilon

    def _tilt_for_epsilon(self, epsilon: float, log_delta: float) -> tuple[float, float]:
        """``(θ, log δ)``: the order, less one, of the best Rényi bound on δ, and that bound."""
        theta = 1.0
        for _ in range(2):
            sketches = self._sketches(theta, log_delta, epsilon + _BEYOND)
            theta, value = _minimise_over_theta(sketches, lambda moments, thetas: moments - thetas * epsilon)
        return theta, min(value, -1e-3)

    def _plan(self, theta: float, log_delta: float, epsilon: float) -> Plan:
        sketches = self._sketches(theta, log_delta, epsilon + _BEYOND)
        moments = [(count, part.moments(theta)) for part, count in sketches]
        cumulant = sum(count * m[0] for count, m in moments)
        mean = sum(count * m[1] for count, m in moments)
        deviation = math.sqrt(max(sum(count * m[2] for count, m in moments), 1e-300))
        ladder = np.concatenate([np.geomspace(0.05, 30, 30) / deviation, theta * np.geomspace(0.05, 4, 20)])
        upward = sum(count * part.log_moments(theta + ladder) for part, count in sketches)
        top = float(np.min((upward - self._log_tail(theta, log_delta) - math.log(self.count)) / (theta + ladder)))
        downward = sum(count * part.log_moments(theta - ladder) for part, count in sketches)
        bottom = float(np.max((cumulant - downward + math.log(1e-10)) / ladder))
        bottom = min(bottom, mean - 2 * deviation, epsilon) - deviation
        # Sums beyond ε + window come back above ε with e^{θ·window} times their weight, unless the window is this wide.
        window = float(np.min((upward - (theta + ladder) * epsilon - log_delta - math.log(1e-7)) / ladder))
        top = max(top, mean + 2 * deviation, epsilon, bottom + window) + deviation
        # The grid adds count·spacing²/12 to the mean loss and twice that to its variance.
        allowed = self.tolerance * min(max(5 * abs(epsilon), 1e-3), 1.0) * min(max(epsilon / 10, 1.0), 2.5)
        spacing = math.sqrt(12 * allowed / (self.count * (1 + theta)))
        spacing = min(spacing, 0.02 * deviation, (top - bottom) / 4096)
        if not self.pessimistic:
            # Rare sampling piles the mass up within a few grid points; merging loses more there than chords do.
            spacing /= 4
        return Plan(theta, max(spacing, (top - bottom) / (MAX_POINTS - 8)), mean, bottom, top)

    def _span(self, pair: Pair, plan: Plan, log_delta: float, epsilon: float) -> tuple[float, float]:
        """The losses that a grid for ``pair`` has to reach."""
        from scipy.special import ndtri_exp

        log_tail = self._log_tail(plan.theta, log_delta)
        lowest, highest = math.inf, -math.inf
        for branch in pair.branches:
            reach = -float(ndtri_exp(log_tail)) * branch.sigma
            means = [mean for _, mean in branch.p]
            low, high = branch.loss(np.clip([min(means) - reach, max(means) + reach], branch.start, branch.stop))
            lowest, highest = min(lowest, float(low)), max(highest, float(high))
        highest = min(highest, epsilon + _BEYOND)
        # Losses far below matter no more once tilted: their mass may as well be moved up to a higher one.
        rough = sketch(pair, log_tail).below(epsilon + _BEYOND)
        cumulant = rough.moments(plan.theta)[0]
        ranked = np.argsort(rough.losses)
        below = np.log(np.cumsum(np.exp(rough.log_mass[ranked])))
        harmless = plan.theta * rough.losses[ranked] - cumulant + below < math.log(1e-12) - math.log(self.count)
        if harmless.any():
            lowest = max(lowest, float(rough.losses[ranked][harmless].max()))
        return lowest, max(lowest, highest)

    def _tail(self, theta: float, log_delta: float, epsilon: float) -> Tail:
        plan = self._plan(theta, log_delta, epsilon)
        spans = [self._span(pair, plan, log_delta, epsilon) for pair, _ in self.parts]
        spacing = max(plan.spacing, max(high - low for low, high in spans) / MAX_POINTS)
        build = pessimistic_grid if self.pessimistic else optimistic_grid
        grids = []
        for (pair, count), (low, high) in zip(self.parts, spans):
            offset = _offset(pair, low, high)
            first, last = math.floor((low - offset) / spacing) - 1, math.ceil((high - offset) / spacing) + 1
            grids.append((build(pair, spacing, first, last, offset), count))
        return Tail(grids, dataclasses.replace(plan, spacing=spacing), self.pessimistic)


def _offset(pair: Pair, low: float, high: float) -> float:
    """A loss that the grid should hit: the median, around which rare sampling piles up nearly all of the mass."""
    if len(pair.branches) > 1:
        return 0.0
    rough = sketch(pair, -40.0)
    ranked = np.argsort(rough.losses)
    mass = np.cumsum(np.exp(rough.log_mass[ranked]))
    return float(np.clip(rough.losses[ranked][np.searchsorted(mass, mass[-1] / 2)], low, high))


class Tail:
    """The upper tail of the composed loss, from one tilted transform."""

    def __init__(self, grids: Sequence[tuple[GridLoss, int]], plan: Plan, pessimistic: bool) -> None:
        from scipy import fft

        self.pessimistic = pessimistic
        self.theta, self.spacing = plan.theta, plan.spacing
        spacing, theta = plan.spacing, plan.theta
        size = fft.next_fast_len(int(math.ceil((plan.top - plan.bottom) / spacing)) + 2, real=True)
        shift = sum(count * grid.offset for grid, count in grids)
        bottom = math.floor((plan.bottom - shift) / spacing)
        floor, top = shift + bottom * spacing, shift + (bottom + size - 1) * spacing
        count_total = sum(count for _, count in grids)
        log_spectrum = np.zeros(size // 2 + 1, dtype=np.complex128)
        log_weakest = np.zeros(size // 2 + 1)
        cumulant, offset, log_finite = 0.0, 0, 0.0
        # Chernoff needs cumulants at other tilts: above θ for sums over the top, below 0 for sums under the bottom.
        width = plan.top - plan.bottom
        self.tilts_above = theta + np.append(np.geomspace(1, 60, 4) / width, [0.3 * theta, theta])
        tilts_below = -np.geomspace(1, 60, 4) / width
        self.cumulants_above, cumulants_below = np.zeros(self.tilts_above.size), np.zeros(tilts_below.size)
        lowest, self.highest = 0.0, 0.0
        for grid, count in grids:
            losses = grid.offset + (grid.first + np.arange(grid.mass.size)) * spacing
            tilted, log_scale = _tilt(grid.mass, losses, theta)
            cumulant += count * log_scale
            log_finite += count * math.log1p(-min(grid.infinite, 1 - 1e-16))
            lowest, self.highest = lowest + count * float(losses[0]), self.highest + count * float(losses[-1])
            above = [log_scale + _log_sum(tilted, losses, tilt - theta) for tilt in self.tilts_above]
            self.cumulants_above += count * np.asarray(above)
            if not pessimistic:
                below = [log_scale + _log_sum(tilted, losses, tilt - theta) for tilt in tilts_below]
                cumulants_below += count * np.asarray(below)
            # Measured from its mean, so that the phases that matter stay small when raised to a large count.
            centre = int(round(float((tilted * np.arange(tilted.size)).sum())))
            offset += count * (grid.first + centre)
            transform = fft.rfft(_wrap(tilted, -centre, size))
            log_one = np.log(np.where(transform == 0, 1e-300, transform))
            np.minimum(log_weakest, log_one.real, out=log_weakest)
            log_one *= count
            log_spectrum += log_one
        with np.errstate(invalid="ignore"):
            spectrum = np.exp(log_spectrum)
            sensitivity = np.exp(log_spectrum.real - log_weakest)
        spectrum[~np.isfinite(spectrum)] = 0.0
        density = np.roll(fft.irfft(spectrum, size), (offset - bottom) % size)
        # Every coefficient of a transform is off by a few ulp·log₂(size); a power multiplies that by count·f^{count-1}.
        ulps = 2 * _ROUNDING * math.log2(size)
        noise = ulps * (count_total * 2 * float(np.nansum(sensitivity)) / size + 2 / size)

        sums = shift + (bottom + np.arange(size)) * spacing
        # Weights are kept in units of e^{log_unit}, relative to the middle of the tilted sum.
        self.reference = plan.mean
        self.log_unit = cumulant - theta * plan.mean
        start = int(np.searchsorted(sums, self.reference - min(500 / theta, 500.0)))
        self.sums, density = sums[start:], density[start:]
        density = np.maximum(density, 0.0) + noise if pessimistic else np.maximum(density - noise, 0.0)
        from_reference = self.sums - self.reference
        weights = density * np.exp(-theta * from_reference)
        decayed = weights * np.exp(-from_reference)
        # after[j] sums over grid points above j: the losses that count at ε in [sums[j], sums[j+1]).
        self.after = np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0)
        self.after_decayed = np.append(np.cumsum(decayed[::-1])[::-1][1:], 0.0)
        self.margin = 1 + 1e-9 * (1 + theta) + 3e-14 * count_total
        self.infinite = -math.expm1(log_finite)
        self.window = size * spacing
        self.top = top
        # A sum under the bottom comes back one window higher, with e^{-θ·window} of its weight.
        self.from_below = 0.0
        if not pessimistic and lowest < floor:
            log_below = min(0.0, float(np.min(cumulants_below - tilts_below * floor)))
            self.from_below = math.exp(log_below - theta * self.window) / -math.expm1(-theta * self.window)

    def _wrapped(self, epsilon: float) -> float:
        """What sums outside the window can hide from δ(ε) (pessimistic), or add to it (optimistic)."""
        if self.pessimistic:
            if self.highest < self.top:
                return 0.0
            return math.exp(min(0.0, float(np.min(self.cumulants_above - self.tilts_above * self.top))))
        if self.highest < epsilon + self.window:
            return self.from_below
        # Sums above ε + k·window come back k windows lower, with e^{kθ·window} times their weight.
        beyond = self.tilts_above - self.theta
        logs = self.cumulants_above - self.tilts_above * epsilon - beyond * self.window
        return self.from_below + math.exp(min(0.0, float(np.min(logs - np.log(-np.expm1(-beyond * self.window))))))

    def delta(self, epsilon: float) -> float:
        """Bound on δ(ε)."""
        if epsilon < self.sums[0]:
            if self.pessimistic:
                return 1.0
            epsilon = float(self.sums[0])
        j = int(np.searchsorted(self.sums, epsilon, side="right")) - 1
        inner = float(self.after[j]) - math.exp(min(epsilon - self.reference, 700.0)) * float(self.after_decayed[j])
        value = math.exp(min(self.log_unit + math.log(inner), 1.0)) if inner > 0 else 0.0
        if self.pessimistic:
            return min(1.0, value * self.margin + self._wrapped(epsilon) + self.infinite)
        return max(0.0, value / self.margin - self._wrapped(epsilon))

    def epsilon(self, delta: float) -> float:
        """Bound on the smallest ε with δ(ε) <= ``delta``; ±∞ where this tail cannot tell."""
        if self.pessimistic:
            return self._solve((delta - self._wrapped(math.inf) - self.infinite) / self.margin)
        # What wraps grows as ε falls: use its value at a point that turns out to lie lower still.
        guess = self._solve(delta * self.margin)
        for shrink in (0.001, 0.01, 0.1, 1.0):
            floor = guess - shrink * (abs(guess) + 10 * self.spacing)
            epsilon = self._solve((delta + self._wrapped(floor)) * self.margin)
            if epsilon >= floor:
                return epsilon
        return -math.inf

    def _solve(self, room: float) -> float:
        """ε at which the δ of the window alone equals ``room``."""
        if room <= 0:
            return math.inf
        goal = math.exp(min(max(math.log(room) - self.log_unit, -700.0), 700.0))
        enough = self.after - np.exp(np.minimum(self.sums - self.reference, 700.0)) * self.after_decayed <= goal
        j = int(np.argmax(enough)) if enough.any() else self.sums.size - 1
        if j == 0:
            return float(self.sums[0]) if self.pessimistic else -math.inf
        head, decayed = float(self.after[j - 1]), float(self.after_decayed[j - 1])
        if head <= goal or decayed <= 0:
            return float(self.sums[j] if self.pessimistic else self.sums[j - 1])
        epsilon = self.reference + math.log((head - goal) / decayed)
        return float(min(max(epsilon, self.sums[j - 1]), self.sums[j]))

    def covers(self, epsilon: float) -> bool:
        """Whether ``epsilon`` lies where this tail is tight (it is sound in any case)."""
        if self.sums[0] <= 0 and epsilon <= 0:
            return True
        return bool(self.sums[0] < epsilon < self.sums[-1])


def _tilt(mass: np.ndarray, losses: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
    """Probabilities proportional to mass·e^{θ·loss}, and the log of their sum before normalising."""
    with np.errstate(divide="ignore"):
        exponents = np.log(mass) + theta * losses
    peak = float(exponents.max())
    tilted = np.exp(exponents - peak)
    total = float(tilted.sum())
    return tilted / total, peak + math.log(total)


def _log_sum(tilted: np.ndarray, losses: np.ndarray, extra: float) -> float:
    """log Σ tilted·e^{extra·loss}."""
    anchor = float(losses[-1] if extra > 0 else losses[0])
    return extra * anchor + math.log(float((tilted * np.exp(extra * (losses - anchor))).sum()) + 1e-300)


def _wrap(values: np.ndarray, start: int, size: int) -> np.ndarray:
    """``values`` laid on a circle of ``size`` points, the first at ``start``."""
    start %= size
    padded = np.zeros(-(-(start + values.size) // size) * size)
    padded[start : start + values.size] = values
    return padded.reshape(-1, size).sum(axis=0)


def _minimise_over_theta(
    sketches: Sequence[tuple[Sketch, int]], bound: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, float]:
    """``(θ, value)`` of the smallest bound(K(θ) + θ log θ - (1+θ) log(1+θ), θ) (Canonne et al. 2020, Prop. 12)."""
    log_thetas = np.linspace(math.log(2.0**-9), math.log(2.0**20), 60)
    best, value = 1.0, math.inf
    for _ in range(3):
        thetas = np.exp(log_thetas)
        moments = sum(count * part.log_moments(thetas) for part, count in sketches)
        values = bound(moments + thetas * np.log(thetas) - (1 + thetas) * np.log1p(thetas), thetas)
        index = int(np.argmin(values))
        best, value = float(thetas[index]), float(values[index])
        step = float(log_thetas[1] - log_thetas[0])
        log_thetas = np.linspace(math.log(best) - step, math.log(best) + step, 9)
    return best, value
