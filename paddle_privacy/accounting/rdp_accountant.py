"""Accounting by Rényi divergences, with the order optimised over the reals."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from .accountant import Accountant, check_delta
from .conversion import rdp_to_delta, rdp_to_epsilon
from .events import Event
from .mechanism import SampledGaussian, decompose, gaussian_precision
from .pairs import dominating_pairs
from .rdp import LARGEST_ORDER, pair_rdp, poisson_gaussian_rdp

# Ladder of orders 1 + 2^(j/2), in rungs that are evaluated together and only as far up as they can matter.
_RUNG = 8
_FIRST, _LAST = -24, 2 * int(math.log2(LARGEST_ORDER))
# With more distinct mechanisms than this (a noise schedule), refinement would cost more than it gains.
_REFINE_LIMIT = 64


def mechanism_rdp(mechanism: SampledGaussian, orders: np.ndarray, group_size: int = 1) -> np.ndarray:
    """Rényi divergence of one mechanism between neighbours that differ in ``group_size`` rows, per order (> 1)."""
    if mechanism.sampling == "none":
        return np.asarray(orders) * gaussian_precision(mechanism, 1, group_size) / 2
    if mechanism.rate == 0 or math.isinf(mechanism.noise_multiplier):
        return np.zeros(np.shape(orders))
    if mechanism.noise_multiplier == 0:
        return np.full(np.shape(orders), math.inf)
    if mechanism.sampling == "poisson" and mechanism.relation != "replace_one" and group_size == 1:
        return poisson_gaussian_rdp(mechanism.rate, mechanism.noise_multiplier, orders)
    return np.max([pair_rdp(pair, orders) for pair in dominating_pairs(mechanism, group_size)], axis=0)


@functools.lru_cache(maxsize=65536)
def _rung(mechanism: SampledGaussian, index: int, group_size: int) -> np.ndarray:
    return mechanism_rdp(mechanism, _rung_orders(index), group_size)


def _rung_orders(index: int) -> np.ndarray:
    exponents = np.arange(_FIRST + index * _RUNG, min(_FIRST + (index + 1) * _RUNG, _LAST + 1))
    return 1 + 2.0 ** (exponents / 2)


_RUNGS = -(-(_LAST + 1 - _FIRST) // _RUNG)


class RDPAccountant(Accountant):
    """Rényi differential privacy (Mironov 2017): divergences add up; the best order converts the sum to (ε, δ).

    The divergence of each event is exact at integer and fractional orders. Without ``orders`` the order is optimised
    continuously; with ``orders`` (each > 1) exactly these are used, to reproduce other libraries. Conversion:
    Canonne, Kamath, Steinke 2020, Proposition 12.

    A query after each of many steps costs the same as one query: running sums are kept per order.
    """

    name = "rdp"

    def __init__(self, orders: Sequence[float] | None = None) -> None:
        super().__init__()
        self._orders: np.ndarray | None = None
        if orders is not None:
            self._orders = np.asarray(list(orders), dtype=np.float64)
            if self._orders.ndim != 1 or not self._orders.size or not np.all(self._orders > 1):
                raise ValueError("orders must be a non-empty sequence of numbers > 1.")
            if not np.all(np.isfinite(self._orders)):
                raise ValueError("orders must be finite.")
        # Per (group size, rung): the sum of divergences, and the mechanisms that are not in it yet.
        self._sums: dict[tuple[int, int], np.ndarray] = {}
        self._pending: dict[tuple[int, int], dict[SampledGaussian, int]] = {}

    def _fresh(self) -> RDPAccountant:
        return RDPAccountant(None if self._orders is None else self._orders.tolist())

    def copy(self) -> RDPAccountant:
        other = super().copy()
        other._sums = dict(self._sums)
        other._pending = {key: dict(value) for key, value in self._pending.items()}
        return other

    def _added(self, mechanism: SampledGaussian, count: int) -> None:
        for waiting in self._pending.values():
            waiting[mechanism] = waiting.get(mechanism, 0) + count

    def get_rdp(self, orders: Sequence[float] | np.ndarray, group_size: int = 1) -> np.ndarray:
        """Rényi divergence of the whole history at each of ``orders`` (all > 1), shape [len(orders)]."""
        orders = np.atleast_1d(np.asarray(orders, dtype=np.float64))
        if not np.all(orders > 1):
            raise ValueError("orders must all be > 1.")
        return self._exact(orders, group_size)

    def _exact(self, orders: np.ndarray, group_size: int) -> np.ndarray:
        total = np.zeros_like(orders)
        for mechanism, count in self._totals.items():
            total = total + count * mechanism_rdp(mechanism, orders, group_size)
        return total

    def _rung_sum(self, index: int, group_size: int) -> np.ndarray:
        key = (group_size, index)
        if key not in self._sums:
            self._sums[key] = np.zeros(_rung_orders(index).size)
            self._pending[key] = dict(self._totals)
        waiting = self._pending[key]
        if waiting:
            total = self._sums[key]
            for mechanism, count in waiting.items():
                total = total + count * _rung(mechanism, index, group_size)
            self._sums[key] = total
            self._pending[key] = {}
        return self._sums[key]

    def _epsilon(self, delta: float, group_size: int) -> float:
        return self._minimise_epsilon(delta, group_size)[0]

    def _delta(self, epsilon: float, group_size: int) -> float:
        def hopeless(order: float, rdp: float, best: float) -> bool:
            return rdp > epsilon + 1

        bound = self._minimise(lambda orders, rdp: rdp_to_delta(orders, rdp, epsilon), hopeless, group_size)[0]
        return min(1.0, bound)

    def best_order(self, delta: float) -> float:
        """The Rényi order that gives :meth:`get_epsilon` at ``delta``."""
        return self._minimise_epsilon(delta, 1)[1]

    def _minimise_epsilon(self, delta: float, group_size: int) -> tuple[float, float]:
        def hopeless(order: float, rdp: float, best: float) -> bool:
            return rdp - 3 * (1 + math.log(order)) / order > best

        return self._minimise(lambda orders, rdp: rdp_to_epsilon(orders, rdp, delta), hopeless, group_size)

    def _minimise(
        self,
        bound: Callable[[np.ndarray, np.ndarray], np.ndarray],
        hopeless: Callable[[float, float, float], bool],
        group_size: int,
    ) -> tuple[float, float]:
        """``(bound, order)`` at the best order found. Any order is sound, so the search can only cost tightness.

        ``hopeless(order, rdp, best)`` says when no larger order can beat ``best``: divergences never fall with the
        order.
        """
        if not self._totals:
            return 0.0, 2.0
        if any(m.noise_multiplier == 0 and m.rate > 0 for m in self._totals):
            return float(bound(np.array([2.0]), np.array([math.inf]))[0]), 2.0
        if self._orders is not None:
            values = bound(self._orders, self._exact(self._orders, group_size))
            best = int(np.argmin(values))
            return float(values[best]), float(self._orders[best])
        value, order = math.inf, 2.0
        for index in range(_RUNGS):
            orders, rdp = _rung_orders(index), self._rung_sum(index, group_size)
            values = bound(orders, rdp)
            best = int(np.argmin(values))
            if values[best] < value:
                value, order = float(values[best]), float(orders[best])
            if index >= 2 and hopeless(float(orders[-1]), float(rdp[-1]), value):
                break
        if value == 0 or len(self._totals) > _REFINE_LIMIT:
            return value, order
        centre, width = math.log(order - 1), math.log(2) / 2
        for _ in range(3):
            logs = centre + width * np.linspace(-1, 1, 9)
            values = bound(1 + np.exp(logs), self._exact(1 + np.exp(logs), group_size))
            best = int(np.argmin(values))
            if values[best] < value:
                value, order = float(values[best]), float(1 + np.exp(logs[best]))
            centre, width = math.log(order - 1), width / 4
        if 0 < best < 8:
            # The vertex of the parabola through the best point and its neighbours.
            left, middle, right = values[best - 1 : best + 2]
            bend = left - 2 * middle + right
            if bend > 0:
                vertex = 1 + math.exp(logs[best] + (logs[1] - logs[0]) * (left - right) / (2 * bend))
                last = float(bound(np.array([vertex]), self._exact(np.array([vertex]), group_size))[0])
                value, order = min((value, order), (last, vertex))
        return value, order


def epsilon_curve(event: Event, steps: Sequence[int] | np.ndarray | int, delta: float) -> np.ndarray:
    """RDP ε after each number of repetitions of ``event``, shape [len(steps)] float64.

    ``steps`` is an array of counts, or an integer S for 1, 2, …, S. ε(T) = min over orders of T·ρ(α) + c(α) is the
    lower envelope of straight lines in T, so 10⁵ points cost little more than one. Within 1e-5 (relative) above what
    :class:`RDPAccountant` answers, and never below the truth.
    """
    check_delta(delta)
    counts = np.asarray(steps, dtype=np.int64)
    if counts.ndim == 0:
        counts = np.arange(1, int(counts) + 1)
    if counts.size and counts.min() < 0:
        raise ValueError("steps must be >= 0.")
    parts, _ = decompose(event)
    if not all(isinstance(mechanism, SampledGaussian) for mechanism, _ in parts):
        one_by_one = [RDPAccountant().compose(event, int(count)).get_epsilon(delta) for count in counts]
        return np.asarray(one_by_one, dtype=np.float64)
    if not counts.size:
        return np.zeros(0)
    # The best order falls as steps are added: the first and the last count bracket all the others.
    positive = counts[counts > 0]
    if not positive.size or not parts:
        return np.zeros(counts.size)
    ends = [RDPAccountant().compose(event, int(count)).best_order(delta) for count in (positive.max(), positive.min())]
    orders: np.ndarray = 1 + np.geomspace((min(ends) - 1) / 1.2, (max(ends) - 1) * 1.2, 100)
    once = RDPAccountant().compose(event)
    slopes: np.ndarray = once.get_rdp(orders)
    if not np.all(np.isfinite(slopes)):
        return np.where(counts > 0, math.inf, 0.0)

    def intercept(orders: np.ndarray) -> np.ndarray:
        return np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)

    tried = np.zeros(0)
    for _ in range(10):
        lines, breaks = _lower_envelope(slopes, intercept(orders))
        # Where two neighbouring lines meet, an order between them may give less; add those that do.
        between = np.sqrt((orders[lines[1:]] - 1) * (orders[lines[:-1]] - 1)) + 1
        wanted = (breaks > positive.min() / 4) & (breaks < positive.max() * 4) & ~np.isin(between, tried)
        tried = np.concatenate([tried, between[wanted]])
        between, meeting, low = between[wanted], breaks[wanted], lines[:-1][wanted]
        if not between.size:
            break
        met = meeting * slopes[low] + intercept(orders)[low]
        extra = once.get_rdp(between)
        gain = met - (meeting * extra + intercept(between))
        useful = gain > 3e-6 * np.abs(met)
        if not useful.any():
            break
        orders = np.concatenate([orders, between[useful]])
        slopes = np.concatenate([slopes, extra[useful]])
    lines, breaks = _lower_envelope(slopes, intercept(orders))
    chosen = lines[np.searchsorted(breaks, counts)]
    values = rdp_to_epsilon(orders[chosen], counts * slopes[chosen], delta)
    return np.where(counts > 0, values, 0.0)


def _lower_envelope(slopes: np.ndarray, intercepts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(indices, breaks)`` of the lines on the lower envelope, in the order in which they take over."""
    kept: list[int] = []
    for i in np.lexsort((intercepts, -slopes)):
        if kept and slopes[kept[-1]] == slopes[i]:
            continue
        while len(kept) >= 2:
            a, b = kept[-2], kept[-1]
            meets_a = (intercepts[i] - intercepts[a]) * (slopes[a] - slopes[b])
            meets_b = (intercepts[b] - intercepts[a]) * (slopes[a] - slopes[i])
            if meets_a > meets_b:
                break
            kept.pop()
        kept.append(int(i))
    lines = np.asarray(kept)
    return lines, (intercepts[lines[1:]] - intercepts[lines[:-1]]) / (slopes[lines[:-1]] - slopes[lines[1:]])
