"""What choosing hyper-parameters on the private data costs.

Either every candidate's run is composed (nothing assumed), or the number of candidates was itself drawn at random
before looking and only the best was released: then the cost is a few times one run, however many were tried.
"""

from __future__ import annotations

import math

import numpy as np

from .accounting.conversion import rdp_to_epsilon
from .accounting.rdp_accountant import RDPAccountant

_ORDERS = 1 + np.geomspace(0.02, 4096, 400)


def expected_runs(eta: float, gamma: float) -> float:
    """E[K] of the truncated negative binomial law (Papernot, Steinke 2022, Definition 1)."""
    if eta == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    return eta * (1 - gamma) / (gamma * (1 - gamma**eta))


def gamma_for(mean: float, eta: float) -> float:
    """γ for which K has this mean; ``mean`` >= 1."""
    if not mean >= 1:
        raise ValueError(f"mean is {mean}; at least one run is always made")
    if not eta > -1:
        raise ValueError(f"eta is {eta}; it must be above -1")
    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):
        middle = math.sqrt(low * high)
        # E[K] falls as γ rises.
        low, high = (low, middle) if expected_runs(eta, middle) < mean else (middle, high)
    return low


def random_search_epsilon(one_run: RDPAccountant, delta: float, mean_runs: float, eta: float = 1.0) -> float:
    """ε of releasing the best of K runs, K drawn from the truncated negative binomial law before the search.

    Papernot, Steinke, "Hyperparameter Tuning with Renyi Differential Privacy", ICLR 2022, Theorem 2: for a run with
    divergence ρ, every λ > 1 and λ' >= 1,

        ρ'(λ) = ρ(λ) + (1+η)(1 - 1/λ')ρ(λ') + (1+η) log(1/γ)/λ' + log E[K]/(λ-1).

    Args:
        one_run: everything that the most expensive candidate spends.
        delta: δ of the answer.
        mean_runs: E[K]; the number actually tried is K, not this.
        eta: shape; 1 is the geometric law, 0 the logarithmic, larger is closer to a fixed number.
    """
    gamma = gamma_for(mean_runs, eta)
    rdp = one_run.get_rdp(_ORDERS)
    selection = (1 + eta) * ((1 - 1 / _ORDERS) * rdp + math.log(1 / gamma) / _ORDERS)
    total = rdp + float(np.min(selection)) + math.log(max(expected_runs(eta, gamma), 1.0)) / (_ORDERS - 1)
    return float(np.min(rdp_to_epsilon(_ORDERS, total, delta)))
