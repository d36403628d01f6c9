"""The smallest ε that the recorded events allow, from the privacy loss distribution itself.

Written apart from :mod:`paddle_privacy.accounting`, with another method, so that one mistake cannot be in both:
the two neighbouring outputs that DP-SGD comes down to (the row's clipped gradient is C in one fixed direction, all
other rows contribute nothing) are compared exactly, and the law of their summed log-likelihood ratio is computed by
FFT (Koskela, Jälkö, Honkela 2020; error bound of Gopi, Lee, Wutschitz 2021, Theorem 5.1).

That pair of data sets exists, so an ε below :attr:`LossInterval.low` is false whatever an accountant says. For
full batches and Poisson sampling the pair is also the worst one (Zhu, Dong, Wang 2022), and the truth lies in
[low, high]; for other sampling only ``low`` is meant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

FINE, COARSE = 1 << 18, 1 << 15
"""Points of the grid. Both give limits that hold; on the fine one they lie closer together."""

_TILTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True)
class Part:
    """``count`` noisy sums in which the row takes part with chance ``rate``, moving the sum by ``shift`` σ's."""

    rate: float
    shift: float
    count: int
    tight: bool
    """Whether this pair of outputs is known to be the worst, not just one that exists."""


@dataclass(frozen=True)
class LossInterval:
    """low <= smallest possible ε at this δ (<= high, where every part is tight)."""

    low: float
    high: float
    tight: bool


def parts_of(event: dict, count: int = 1) -> list[Part]:
    """The noisy sums inside an event as recorded.

    Raises:
        ValueError: the event is of a kind that this module does not know.
    """
    kind, inner, several = _read(event)
    if kind == "SelfComposed":
        return [part for part in parts_of(_one(inner, kind), count * int(event["count"])) if part.count]
    if kind == "Composed":
        return [part for item in several for part in parts_of(item, count)]
    if kind in ("Gaussian", "ShuffledEpoch"):
        return [Part(1.0, _shift(event), count, True)]
    if kind in ("PoissonSampled", "TruncatedPoisson"):
        return [Part(float(event["sample_rate"]), _shift(_one(inner, kind)), count, kind == "PoissonSampled")]
    if kind == "FixedSize":
        rate = int(event["batch_size"]) / int(event["dataset_size"])
        return [Part(rate, _shift(_one(inner, kind)), count, rate == 1)]
    raise ValueError(f"event {kind!r} is unknown to the verifier")


def _read(event: dict) -> tuple[str, list[dict], list[dict]]:
    """(class name, the event inside it, the list of events inside it)."""
    kind = next(value for key, value in event.items() if key in ("event", "type", "kind") and isinstance(value, str))
    inner = [value for value in event.values() if isinstance(value, dict)]
    several = [item for value in event.values() if isinstance(value, list) for item in value]
    return kind, inner, several


def _one(inner: list[dict], kind: str) -> dict:
    if len(inner) != 1:
        raise ValueError(f"event {kind!r} must hold one event, found {len(inner)}")
    return inner[0]


def _shift(event: dict) -> float:
    """Distance of the two neighbouring sums in standard deviations; sums over one batch add up in squares."""
    kind, inner, several = _read(event)
    if kind == "Gaussian":
        sigma = float(event["noise_multiplier"])
        distance = 2.0 if event.get("neighbours") == "replace_one" else 1.0
        return distance / sigma if sigma > 0 else math.inf
    if kind == "Composed":
        return math.sqrt(sum(_shift(item) ** 2 for item in several))
    if kind == "SelfComposed":
        return math.sqrt(int(event["count"])) * _shift(_one(inner, kind))
    if kind == "ShuffledEpoch":
        return _shift(_one(inner, kind))
    raise ValueError(f"event {kind!r} inside a sampled event is unknown to the verifier")


def epsilon_interval(parts: list[Part], delta: float, grid: int = FINE) -> LossInterval:
    """Where the smallest ε at ``delta`` lies, adding and removing the row both considered."""
    live = _merged(parts)
    if not live:
        return LossInterval(0.0, 0.0, True)
    tight = all(part.tight for part in live)
    if any(math.isinf(part.shift) for part in live):
        return LossInterval(math.inf, math.inf, tight)
    sides = [_one_direction(live, removing, delta, grid) for removing in (True, False)]
    return LossInterval(max(low for low, _ in sides), max(high for _, high in sides), tight)


def _merged(parts: list[Part]) -> list[Part]:
    counts: dict[tuple[float, float], tuple[int, bool]] = {}
    for part in parts:
        count, tight = counts.get((part.rate, part.shift), (0, True))
        counts[part.rate, part.shift] = (count + part.count, tight and part.tight)
    merged, squares, tight_full = [], 0.0, True
    for (rate, shift), (count, tight) in counts.items():
        if count == 0 or rate == 0 or shift == 0:
            continue
        if rate == 1:
            squares, tight_full = squares + count * shift**2, tight_full and tight
        else:
            merged.append(Part(rate, shift, count, tight))
    if squares:
        merged.append(Part(1.0, math.sqrt(squares), 1, tight_full))
    return merged


def _one_direction(parts: list[Part], removing: bool, delta: float, grid: int) -> tuple[float, float]:
    """(ε low, ε high) of one direction, by a grid that is fitted to the composed loss."""
    count = sum(part.count for part in parts)
    slack = 1e-3 * delta
    # Hoeffding: the sum of all rounding errors stays within ``roundings`` steps, but for a chance of ``slack``.
    roundings = math.sqrt(count / 2 * math.log(2 / slack))
    while grid < 8 * roundings:
        grid *= 2
    # The rounded sum must stay in the window as well.
    width = _window(parts, removing, slack) / (1 - 2 * roundings / grid)
    step = 2 * width / grid
    spectrum = np.ones(grid // 2 + 1, dtype=np.complex128)
    center, drift, lost = 0.0, 0.0, 0.0
    for part in parts:
        mass, shift, rounded_mean, missing = _discrete_loss(part, removing, step, grid)
        spectrum *= np.fft.rfft(mass) ** part.count
        center += part.count * shift
        drift += part.count * rounded_mean
        lost += part.count * missing
    law = np.maximum(np.fft.irfft(spectrum, grid), 0.0)
    # The law is cyclic; the window is laid around its mean.
    middle = round(drift / step)
    losses = (np.arange(grid) - grid // 2 + middle) * step + center
    law = np.roll(law, grid // 2 - middle)
    # Out of the window, beyond the roundings' reach, lost in tails; and a power of the spectrum keeps its absolute
    # error within the count of factors times the machine's precision.
    error = 3 * slack + lost + 4 * float(np.finfo(np.float64).eps) * (math.sqrt(grid) + count)
    reach = roundings * step
    low = _epsilon_at(losses, law, delta + error) - reach
    high = _epsilon_at(losses, law, delta - error) + reach if delta > 2 * error else math.inf
    return max(0.0, low), max(0.0, high)


def _window(parts: list[Part], removing: bool, chance: float) -> float:
    """Half-width of a window around its mean that the composed loss leaves with at most this chance (Chernoff)."""
    wanted = math.log(chance / 2)
    widest = 0.0
    for sign in (1.0, -1.0):
        best = math.inf
        for tilt in _TILTS:
            total = 0.0
            for part in parts:
                values, log_mass = _fine_loss(part, removing, tilt)
                centred = values - float(np.exp(log_mass) @ values)
                total += part.count * float(special.logsumexp(sign * tilt * centred + log_mass))
            best = min(best, (total - wanted) / tilt)
        widest = max(widest, best)
    return 1.05 * widest + 1e-3


def _fine_loss(part: Part, removing: bool, tilt: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Loss values and log masses on a plain grid in output space, wide enough for moments of order ``tilt``."""
    reach = 12 + (1 + tilt) * part.shift
    z = np.linspace(-reach, reach, max(4001, 2 * int(20 * reach) + 1))
    log_density = -0.5 * z**2
    ratio = _log_ratio(z, part)
    if removing:
        log_density = log_density + ratio
    log_mass = log_density - special.logsumexp(log_density)
    return (ratio if removing else -ratio), log_mass


def _log_ratio(z: np.ndarray, part: Part) -> np.ndarray:
    """log of mixture density over plain density at z standard deviations."""
    exponent = part.shift * z - part.shift**2 / 2
    if part.rate == 1:
        return exponent
    return np.logaddexp(math.log1p(-part.rate), math.log(part.rate) + exponent)


def _discrete_loss(part: Part, removing: bool, step: float, grid: int) -> tuple[np.ndarray, float, float, float]:
    """The loss, less a multiple of ``step``, rounded to the wrapped grid.

    Returns the masses; what to add to the grid's offsets to restore the mean; the mean of the offsets; the mass that
    lies outside of the grid.
    """
    mean = _mean_loss(part, removing)
    base = step * round(mean / step)
    edges = base + (np.arange(grid + 1) - grid // 2 - 0.5) * step
    below, above = _loss_cdf(part, removing, edges)
    mass = np.where(below[1:] < 0.5, np.diff(below), -np.diff(above))
    mass = np.maximum(mass, 0.0)
    missing = float(below[0] + above[-1])
    rounded_mean = float(mass @ ((np.arange(grid) - grid // 2) * step))
    return np.roll(mass, -(grid // 2)), mean - rounded_mean, rounded_mean, missing


def _loss_cdf(part: Part, removing: bool, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P[loss <= edge], P[loss > edge]), both accurate in their own tail."""
    target = edges if removing else -edges
    if part.rate == 1:
        z = target / part.shift + part.shift / 2
    else:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            # log((e^t - (1-q))/q), the likelihood ratio of the sampled row alone.
            inner = np.where(
                target > math.log1p(-part.rate),
                target + np.log1p(-np.minimum(np.exp(math.log1p(-part.rate) - target), 1.0)) - math.log(part.rate),
                -np.inf,
            )
        z = inner / part.shift + part.shift / 2
    if removing:
        below = (1 - part.rate) * special.ndtr(z) + part.rate * special.ndtr(z - part.shift)
        above = (1 - part.rate) * special.ndtr(-z) + part.rate * special.ndtr(part.shift - z)
        return below, above
    return special.ndtr(-z), special.ndtr(z)


def _mean_loss(part: Part, removing: bool) -> float:
    """E[loss], by quadrature in output space."""
    values, log_mass = _fine_loss(part, removing)
    return float(np.exp(log_mass) @ values)


def _epsilon_at(losses: np.ndarray, law: np.ndarray, delta: float) -> float:
    """The ε where E[(1 - e^{ε - loss})₊] = δ; 0 or less where that is already true at ε = 0."""
    if delta >= 1:
        return 0.0
    tail = np.cumsum(law[::-1])[::-1]
    low, high = float(losses[0]), float(losses[-1])

    def excess(epsilon: float) -> float:
        first = int(np.searchsorted(losses, epsilon, side="right"))
        if first >= len(losses):
            return -delta
        return float(tail[first] - law[first:] @ np.exp(epsilon - losses[first:])) - delta

    if excess(low) <= 0:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high
