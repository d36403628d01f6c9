"""Accounting by privacy loss distributions: the tightest numbers, with proof of the direction of every error."""

from __future__ import annotations

import math
from collections.abc import Callable

from .accountant import Accountant, Totals, check_delta, check_group_size
from .gaussian import gaussian_delta, gaussian_epsilon
from .mechanism import SampledGaussian, gaussian_precision
from .pairs import Pair, dominating_pairs
from .pld import Composition
from .rdp_accountant import RDPAccountant

# More distinct mechanisms than this are grouped, each group counted as its costliest member.
_MAX_DISTINCT = 48
# Beyond this ε, e^ε leaves little of double precision and nothing of privacy: sampled histories get the Rényi bound.
_LARGEST_EPSILON = 600.0


class PLDAccountant(Accountant):
    """Numerical composition of privacy loss distributions (Sommer et al. 2019; Koskela et al. 2020).

    ε and δ are upper bounds; ε is within about 1e-4 of the truth. :meth:`get_epsilon_bounds` brackets the truth from
    both sides. Both directions of neighbours are composed and the worse one is reported. Histories without subsampling
    are one Gaussian and answered in closed form. Where ε exceeds 600 the Rényi bound is given.

    ``tolerance`` is the widening of ε that the grid may cause for ε between 0.2 and 10; outside it scales with ε.
    """

    name = "pld"

    def __init__(self, tolerance: float = 4e-5) -> None:
        super().__init__()
        if not 1e-8 <= tolerance <= 1:
            raise ValueError(f"tolerance must lie in [1e-8, 1], got {tolerance!r}.")
        self.tolerance = tolerance

    def _fresh(self) -> PLDAccountant:
        return PLDAccountant(self.tolerance)

    def get_epsilon_bounds(self, delta: float, group_size: int = 1) -> tuple[float, float]:
        """``(lower, upper)`` around the exact ε of the composed dominating pairs at ``delta``.

        With truncated Poisson sampling the lower number is that of Poisson sampling without truncation.
        """
        check_delta(delta)
        check_group_size(group_size)
        upper = self.get_epsilon(delta, group_size)
        if upper > _LARGEST_EPSILON:
            return 0.0 if any(part.sampling != "none" for part in self._totals) else upper, upper
        lower = max(self._each(group_size, False, lambda c: c.epsilon(delta), lambda mu: gaussian_epsilon(mu, delta)))
        return min(lower, upper), upper

    def _epsilon(self, delta: float, group_size: int) -> float:
        renyi = self._renyi()._epsilon(delta, group_size)
        if renyi > _LARGEST_EPSILON and any(part.sampling != "none" for part in self._totals):
            return renyi
        composed = self._each(group_size, True, lambda c: c.epsilon(delta), lambda mu: gaussian_epsilon(mu, delta))
        return min(renyi, max(composed))

    def _delta(self, epsilon: float, group_size: int) -> float:
        renyi = self._renyi()._delta(epsilon, group_size)
        if epsilon > _LARGEST_EPSILON and any(part.sampling != "none" for part in self._totals):
            return renyi
        composed = self._each(group_size, True, lambda c: c.delta(epsilon), lambda mu: gaussian_delta(mu, epsilon))
        return min(renyi, max(composed))

    def _renyi(self) -> RDPAccountant:
        accountant = RDPAccountant()
        accountant._totals = dict(self._totals)
        return accountant

    def _each(
        self,
        group_size: int,
        pessimistic: bool,
        composed: Callable[[Composition], float],
        closed_form: Callable[[float], float],
    ) -> list[float]:
        """The answer in each direction of neighbours that may be the largest."""
        totals = {part: n for part, n in self._totals.items() if part.rate > 0 and part.noise_multiplier < math.inf}
        precision = sum(
            gaussian_precision(part, count, group_size) for part, count in totals.items() if part.sampling == "none"
        )
        sampled = {part: count for part, count in totals.items() if part.sampling != "none"}
        if any(part.noise_multiplier == 0 for part in sampled):
            precision = math.inf
        if not sampled or math.isinf(precision):
            return [closed_form(math.sqrt(precision))]
        if pessimistic and len(sampled) > _MAX_DISTINCT:
            sampled = _grouped(sampled)
        directions: tuple[list[tuple[Pair, int]], ...] = ([], [])
        for part, count in sampled.items():
            pairs = dominating_pairs(part, group_size)
            for index, direction in enumerate(directions):
                direction.append((pairs[index % len(pairs)], count))
        if precision > 0:
            unsampled = SampledGaussian("none", 1.0, 1 / math.sqrt(precision), "add_or_remove_one")
            for direction in directions:
                direction.append((dominating_pairs(unsampled)[0], 1))
        distinct = directions[:1] if directions[0] == directions[1] else directions
        answers = [composed(Composition(distinct[0], pessimistic, self.tolerance))]
        for direction in distinct[1:]:
            if pessimistic:
                # A coarse upper bound is enough to see that this direction is not the worse one.
                coarse = composed(Composition(direction, True, 25 * self.tolerance))
                if coarse <= answers[0]:
                    continue
            answers.append(composed(Composition(direction, pessimistic, self.tolerance)))
        return answers


def _grouped(totals: Totals) -> Totals:
    """At most ``_MAX_DISTINCT`` mechanisms that dominate those in ``totals``, count for count.

    Less noise dominates (add noise afterwards), and so does a higher Poisson rate (drop the batch's signal with
    probability 1 - q/q'). Sampling without replacement is grouped by noise alone.
    """
    kinds: dict[tuple[str, str, float], list[SampledGaussian]] = {}
    for part in totals:
        kinds.setdefault((part.sampling, part.relation, part.rate if part.sampling == "fixed" else 0.0), []).append(
            part
        )
    out: Totals = {}
    for (sampling, relation, _), parts in kinds.items():
        parts.sort(key=lambda part: (part.rate, part.noise_multiplier))
        share = max(1, _MAX_DISTINCT * len(parts) // len(totals))
        size = math.ceil(len(parts) / share)
        for start in range(0, len(parts), size):
            group = parts[start : start + size]
            worst = SampledGaussian(
                sampling,
                max(part.rate for part in group),
                min(part.noise_multiplier for part in group),
                relation,
            )
            out[worst] = out.get(worst, 0) + sum(totals[part] for part in group)
    return out
