"""Rényi divergences of subsampled Gaussians, exact at every real order."""

from __future__ import annotations

import math

import numpy as np

from .pairs import Branch, Pair

# Beyond these, quadrature would need too many nodes; an interpolation between integer orders, never below the
# truth, takes over.
_SMALLEST_SIGMA = 0.05
_MAX_NODES = 60_000
LARGEST_ORDER = 1 << 15


def poisson_gaussian_rdp(sample_rate: float, noise_multiplier: float, orders: np.ndarray) -> np.ndarray:
    """D_α((1-q)·N(0, σ²) + q·N(1, σ²) ‖ N(0, σ²)) for every α in ``orders`` (all > 1).

    This is the larger of the two directions, hence the Rényi-DP of one step under add-or-remove-one and under
    zero-out (Mironov, Talwar, Zhang 2019, Theorems 4 and 5).

    With u = q(e^{(2x-1)/(2σ²)} - 1) the moment is 1 + E[(1+u)^α - 1 - αu] over x ~ N(0, σ²), because E[u] = 0. The
    bracket is non-negative, so nothing cancels even where the divergence is 1e-30. The trapezoid rule converges
    geometrically for such integrands (Trefethen & Weideman 2014): the spacing below puts its error under 1e-17.
    """
    orders = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    if sample_rate == 0 or math.isinf(noise_multiplier):
        return np.zeros_like(orders)
    if noise_multiplier == 0:
        return np.full_like(orders, math.inf)
    if sample_rate == 1:
        return orders / (2 * noise_multiplier**2)
    out = np.empty_like(orders)
    spacing = _spacing(noise_multiplier)
    span = np.maximum(orders, 2.0) + 20 * noise_multiplier
    quadrature = (noise_multiplier >= _SMALLEST_SIGMA) & (span / spacing <= _MAX_NODES)
    ranked = np.flatnonzero(quadrature)[np.argsort(orders[quadrature], kind="stable")]
    # A handful of orders at a time share the nodes that the largest of them needs.
    for start in range(0, ranked.size, 8):
        chunk = ranked[start : start + 8]
        out[chunk] = _log_moment(sample_rate, noise_multiplier, orders[chunk], spacing)
    for index in np.flatnonzero(~quadrature):
        out[index] = _interpolated_log_moment(sample_rate, noise_multiplier, float(orders[index]))
    return out / (orders - 1) * (1 + 1e-12)


def _spacing(sigma: float) -> float:
    return min(0.4 * sigma, 0.45 * sigma * sigma)


def _log_moment(q: float, sigma: float, orders: np.ndarray, spacing: float) -> np.ndarray:
    top = max(float(orders.max()), 2.0) + 10 * sigma
    x = np.arange(-10 * sigma, top, spacing)
    log_ratio = (2 * x - 1) / (2 * sigma * sigma)
    log_weight = -x * x / (2 * sigma * sigma) + math.log(spacing / (sigma * math.sqrt(2 * math.pi)))
    terms = log_weight + log_excess(q, log_ratio, orders)
    peak = terms.max(axis=1, keepdims=True)
    total = peak[:, 0] + np.log(np.exp(terms - peak).sum(axis=1))
    return np.logaddexp(0.0, total)


def log_excess(q: float, log_ratio: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """log((1+u)^α - 1 - αu) for u = q(e^{log_ratio} - 1), shape [len(orders), len(log_ratio)]."""
    if q > 0.5:
        log1p_u = np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + log_ratio)
    else:
        log1p_u = np.where(
            log_ratio < 30,
            np.log1p(q * np.expm1(np.minimum(log_ratio, 30.0))),
            np.logaddexp(math.log1p(-q), math.log(q) + log_ratio),
        )
    return log_convex_excess(log1p_u, orders)


def log_convex_excess(log1p_u: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """log((1+u)^α - 1 - αu) from log(1+u), without cancellation; -inf where u = 0."""
    alpha = np.asarray(orders, dtype=np.float64)[:, None]
    u = np.expm1(np.minimum(log1p_u, 600.0))
    t = alpha * log1p_u
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        direct = np.expm1(np.minimum(t, 600.0)) - alpha * u
        # Binomial series where the direct form would cancel; |αu| < 0.02 leaves a relative remainder below 1e-15.
        series = np.ones_like(direct)
        for k in range(10, 2, -1):
            series = 1 + series * (alpha - k + 1) / k * u
        series = alpha * (alpha - 1) / 2 * u * u * series
        small = np.log(np.where(np.abs(alpha * u) < 0.02, series, direct))
        # For large t, (1+u)^α outgrows 1 + αu.
        large = t + np.log1p(-np.exp(np.minimum(np.logaddexp(0.0, np.log(alpha) + log1p_u) - t, -1e-300)))
    return np.where(t > 500, large, small)


def integer_log_moment(q: float, sigma: float, order: int) -> float:
    """log Σₖ C(α,k)(1-q)^{α-k} q^k e^{k(k-1)/(2σ²)} (Mironov, Talwar, Zhang 2019, section 3.3)."""
    from scipy.special import gammaln

    k = np.arange(order + 1)
    log_terms = (
        gammaln(order + 1)
        - gammaln(k + 1)
        - gammaln(order - k + 1)
        + (order - k) * math.log1p(-q)
        + k * math.log(q)
        + k * (k - 1) / (2 * sigma * sigma)
    )
    peak = log_terms.max()
    return float(peak + np.log(np.exp(log_terms - peak).sum()))


def _interpolated_log_moment(q: float, sigma: float, order: float) -> float:
    """Upper bound between integers: the log-moment is convex in the order (Hölder) and 0 at order 1."""
    low = math.floor(order)
    lower = integer_log_moment(q, sigma, low) if low > 1 else 0.0
    if order == low:
        return lower
    upper = integer_log_moment(q, sigma, low + 1)
    return lower + (order - low) * (upper - lower)


def pair_rdp(pair: Pair, orders: np.ndarray) -> np.ndarray:
    """D_α(P ‖ Q) of a dominating pair for every α in ``orders`` (all > 1); ∞ where quadrature would take too long.

    If (P, Q) dominates a mechanism then its Rényi divergences bound the mechanism's (both are integrals of hockey-stick
    divergences with non-negative weights). Composite Gauss-Legendre quadrature of E_Q[r^α - 1 - α(r-1)], r = p/q.
    """
    orders = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    out = np.empty_like(orders)
    for index, order in enumerate(orders):
        log_excess_moment = -math.inf
        for branch in pair.branches:
            log_excess_moment = float(np.logaddexp(log_excess_moment, _branch_log_excess(branch, float(order))))
        out[index] = np.logaddexp(0.0, log_excess_moment)
    return out / (orders - 1) * (1 + 1e-10)


def _branch_log_excess(branch: Branch, order: float) -> float:
    """log ∫ q(x)·((1+u)^α - 1 - αu) dx over the branch, u = p/q - 1."""
    sigma = branch.sigma
    means = [mean for _, mean in branch.p + branch.q]
    # p^α q^{1-α} of single components peaks at α·(mean of p) - (α-1)·(mean of q).
    reach = max(order, 2.0) * (max(means) - min(means))
    low = max(branch.start, min(means) - 12 * sigma)
    high = min(branch.stop, max(means) + reach + 12 * sigma)
    if high <= low:
        return -math.inf
    width = min(sigma, sigma * sigma) * min(1.0, 8 / math.sqrt(order))
    panels = math.ceil((high - low) / width)
    if panels > _MAX_NODES // 8:
        return math.inf
    edges = np.linspace(low, high, panels + 1)
    half = (edges[1] - edges[0]) / 2
    x = (edges[:-1, None] + half * (_NODES + 1)).ravel()
    log_weight = np.tile(np.log(_WEIGHTS * half), panels) + branch.log_q(x)
    terms = log_weight + log_convex_excess(branch.loss(x), np.array([order]))[0]
    peak = float(terms.max())
    return peak + math.log(float(np.exp(terms - peak).sum())) if math.isfinite(peak) else peak


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
