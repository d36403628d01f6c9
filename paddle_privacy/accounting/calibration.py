"""One of σ, steps, sample rate, ε or δ from the other quantities; a calibrated answer never exceeds its target."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from ..errors import PrivacyWarning
from .accountant import Accountant, check_delta
from .events import Event, Gaussian, PoissonSampled


def get_accountant(accountant: str | Accountant = "rdp") -> Accountant:
    """A new accountant by name ("rdp", "zcdp" or "pld"); an instance is returned as it is."""
    if isinstance(accountant, Accountant):
        return accountant
    if accountant == "rdp":
        from .rdp_accountant import RDPAccountant

        return RDPAccountant()
    if accountant == "zcdp":
        from .zcdp import ZCDPAccountant

        return ZCDPAccountant()
    if accountant == "pld":
        from .pld_accountant import PLDAccountant

        return PLDAccountant()
    raise ValueError(f"accountant must be 'rdp', 'zcdp', 'pld' or an Accountant instance, got {accountant!r}.")


def compute_epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str | Accountant = "rdp",
    group_size: int = 1,
) -> float:
    """ε of ``steps`` Poisson-sampled Gaussian steps at ``delta`` (add-or-remove-one; ``sample_rate`` 1: no sampling).

    An accountant instance is only asked for its kind and settings; its own history is neither used nor changed.
    """
    check_delta(delta)
    fresh = get_accountant(accountant)._fresh()
    return fresh.step(noise_multiplier, sample_rate, steps).get_epsilon(delta, group_size)


def compute_delta(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    epsilon: float,
    accountant: str | Accountant = "rdp",
    group_size: int = 1,
) -> float:
    """δ of ``steps`` Poisson-sampled Gaussian steps at ``epsilon``; see :func:`compute_epsilon`."""
    fresh = get_accountant(accountant)._fresh()
    return fresh.step(noise_multiplier, sample_rate, steps).get_delta(epsilon, group_size)


def steps_for_epochs(epochs: float, sample_rate: float) -> int:
    """The number of steps in which each row is expected ``epochs`` times, rounded up."""
    if not (isinstance(epochs, (int, float)) and not isinstance(epochs, bool) and 0 <= epochs < math.inf):
        raise ValueError(f"epochs must be a number >= 0, got {epochs!r}.")
    _check_rate(sample_rate)
    return math.ceil(epochs / sample_rate * (1 - 1e-12))


def default_delta(dataset_size: int) -> float:
    """δ = 1/N^1.1 by rule of thumb, with a :class:`PrivacyWarning`: δ is a policy decision, not a hyper-parameter."""
    if isinstance(dataset_size, bool) or not isinstance(dataset_size, int) or dataset_size < 2:
        raise ValueError(f"dataset_size must be an integer >= 2, got {dataset_size!r}.")
    delta = dataset_size**-1.1
    warnings.warn(
        f"delta was not given; {delta:.2g} = dataset_size^-1.1 is a rule of thumb that keeps it below 1/N. Choose it "
        "with whoever is responsible for the data and pass it explicitly.",
        PrivacyWarning,
        stacklevel=2,
    )
    return delta


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int | None = None,
    epochs: float | None = None,
    accountant: str | Accountant = "rdp",
    group_size: int = 1,
    rtol: float = 1e-5,
) -> float:
    """The smallest σ (within ``rtol``) whose ε at ``target_delta`` is at most ``target_epsilon``.

    Give ``steps``, or ``epochs`` for ceil(epochs/sample_rate) steps. The answer never overshoots the target.
    """
    if (steps is None) == (epochs is None):
        raise ValueError("Exactly one of steps and epochs must be given.")
    _check_rate(sample_rate)
    count = steps_for_epochs(epochs, sample_rate) if epochs is not None else steps
    assert count is not None

    def event(sigma: float) -> Event:
        return Gaussian(sigma) if sample_rate == 1 else PoissonSampled(sample_rate, Gaussian(sigma))

    return calibrate_noise_multiplier(
        event,
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        count=count,
        accountant=accountant,
        group_size=group_size,
        rtol=rtol,
    )


def calibrate_noise_multiplier(
    event: Callable[[float], Event],
    *,
    target_epsilon: float,
    target_delta: float,
    count: int = 1,
    accountant: str | Accountant = "rdp",
    group_size: int = 1,
    rtol: float = 1e-5,
) -> float:
    """The smallest σ for which ``count`` times ``event(σ)`` stays within (target_epsilon, target_delta).

    ``event`` maps a noise multiplier to any event, for example ``lambda s: ShuffledEpoch(Gaussian(s))``; more noise
    must not cost more. The search ends on a σ that was checked, so it never overshoots.
    """
    check_target(target_epsilon)
    check_delta(target_delta, "target_delta")
    _check_steps(count)
    kind = get_accountant(accountant)

    def epsilon(sigma: float) -> float:
        return kind._fresh().compose(event(sigma), count).get_epsilon(target_delta, group_size)

    if count == 0 or epsilon(1e-6) <= target_epsilon:
        return 1e-6
    # The Rényi bound is cheap and never far above: it brackets the answer of a slower accountant.
    start, factor = 1.0, 2.0
    if kind.name == "pld":
        start, factor = _start_from_renyi(event, target_epsilon, target_delta, count, group_size), 1.1
    low, high = start / factor, start
    while epsilon(high) > target_epsilon:
        low, high = high, factor * high
        factor *= factor
        if high > 1e12:
            raise ValueError(
                f"target_epsilon={target_epsilon!r} at target_delta={target_delta!r} is out of reach for {count} steps "
                "whatever the noise."
            )
    while high == start and epsilon(low) <= target_epsilon:
        start = high = low
        low /= factor
    return _shrink(epsilon, target_epsilon, low, high, rtol)


def _start_from_renyi(
    event: Callable[[float], Event], target_epsilon: float, target_delta: float, count: int, group_size: int
) -> float:
    try:
        return calibrate_noise_multiplier(
            event,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            count=count,
            group_size=group_size,
            rtol=1e-2,
        )
    except ValueError:
        return 1.0


def _shrink(epsilon: Callable[[float], float], target: float, low: float, high: float, rtol: float) -> float:
    """Root of a decreasing function in logarithms (Illinois), keeping epsilon(high) <= target < epsilon(low)."""
    value_low, value_high = _gap(epsilon(low), target), _gap(epsilon(high), target)
    for _ in range(200):
        if high - low <= rtol * high:
            break
        ratio = 0.5
        if math.isfinite(value_low) and math.isfinite(value_high) and value_low > value_high:
            ratio = value_low / (value_low - value_high)
        ratio = min(max(ratio, 0.02), 0.98)
        middle = low * (high / low) ** ratio
        # Aim a little to the safe side, so that the bracket closes from both ends.
        middle = min(middle * (1 + 0.3 * rtol), high * (1 - 0.1 * rtol))
        value = _gap(epsilon(middle), target)
        if value <= 0:
            high, value_high, value_low = middle, value, value_low / 2
        else:
            low, value_low, value_high = middle, value, value_high / 2
    return high


def _gap(epsilon: float, target: float) -> float:
    if epsilon == 0:
        return -50.0
    return math.log(epsilon / target) if math.isfinite(epsilon) else math.inf


def get_steps(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    sample_rate: float,
    accountant: str | Accountant = "rdp",
    group_size: int = 1,
) -> int:
    """The largest number of steps whose ε stays within the target (0 where not even one does)."""
    check_target(target_epsilon)
    check_delta(target_delta, "target_delta")
    kind = get_accountant(accountant)

    def fits(steps: int) -> bool:
        fresh = kind._fresh().step(noise_multiplier, sample_rate, steps)
        return fresh.get_epsilon(target_delta, group_size) <= target_epsilon

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > 1 << 60:
            raise ValueError(
                f"sample_rate={sample_rate!r} with noise_multiplier={noise_multiplier!r} allows unlimited steps."
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def get_sample_rate(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    steps: int,
    accountant: str | Accountant = "rdp",
    group_size: int = 1,
) -> float:
    """The largest Poisson sampling rate (within 1e-5, relative) whose ε stays within the target; at most 1."""
    check_target(target_epsilon)
    check_delta(target_delta, "target_delta")
    _check_steps(steps)
    kind = get_accountant(accountant)

    def epsilon(rate: float) -> float:
        return kind._fresh().step(noise_multiplier, rate, steps).get_epsilon(target_delta, group_size)

    if epsilon(1.0) <= target_epsilon:
        return 1.0
    low, high = 1.0, 1.0
    while epsilon(low) > target_epsilon:
        low, high = low / 4, low
        if low < 1e-15:
            return 0.0
    while high - low > 1e-5 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon(middle) <= target_epsilon else (low, middle)
    return low


def check_target(target_epsilon: Any) -> None:
    """Raises ValueError unless ``target_epsilon`` is a finite number > 0."""
    if isinstance(target_epsilon, bool) or not isinstance(target_epsilon, (int, float)):
        raise TypeError(f"target_epsilon must be a number > 0, got {target_epsilon!r}.")
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be a finite number > 0, got {target_epsilon!r}.")


def _check_steps(steps: Any) -> None:
    if isinstance(steps, bool) or not hasattr(steps, "__index__") or steps < 0:
        raise ValueError(f"steps must be an integer >= 0, got {steps!r}.")


def _check_rate(sample_rate: Any) -> None:
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, (int, float)) or not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate!r}.")
