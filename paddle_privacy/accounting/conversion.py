"""From Rényi divergences to (ε, δ)."""

from __future__ import annotations

import math

import numpy as np


def rdp_to_epsilon(orders: np.ndarray, rdp: np.ndarray, delta: float) -> np.ndarray:
    """ε at each order (Canonne, Kamath, Steinke 2020, Proposition 12; ``orders`` > 1, ``rdp`` >= 0, same shape).

    A mechanism with Rényi divergence at most ρ(α) of order α is (ε, δ)-DP for

        ε = ρ(α) + log((α-1)/α) - (log δ + log α)/(α-1).

    Where ρ is so small that the total variation distance is below δ already, √(1 - e^{-ρ}) <= δ (Bretagnolle and
    Huber, with KL <= ρ(α)), ε is 0. Every order gives a valid bound; take the smallest.
    """
    orders = np.asarray(orders, dtype=np.float64)
    rdp = np.asarray(rdp, dtype=np.float64)
    epsilon = rdp + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    epsilon = np.where(-np.expm1(-rdp) <= delta * delta, 0.0, epsilon)
    return np.maximum(epsilon, 0.0)


def rdp_to_delta(orders: np.ndarray, rdp: np.ndarray, epsilon: float) -> np.ndarray:
    """δ at each order, the inverse of :func:`rdp_to_epsilon`:

    δ = exp((α-1)(ρ(α) - ε))/(α-1)·(1 - 1/α)^α, and never more than √(1 - e^{-ρ(α)}).
    """
    orders = np.asarray(orders, dtype=np.float64)
    rdp = np.asarray(rdp, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        log_delta = (orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    log_delta = np.where(np.isinf(rdp), 0.0, log_delta)
    by_order = np.exp(np.minimum(log_delta, 0.0))
    return np.minimum(by_order, np.sqrt(-np.expm1(-rdp)))
