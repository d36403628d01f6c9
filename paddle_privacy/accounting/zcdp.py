"""Zero-concentrated differential privacy."""

from __future__ import annotations

import math

import numpy as np

from ..errors import UnsupportedEvent
from .accountant import Accountant
from .events import Event
from .gaussian import gaussian_delta, gaussian_epsilon
from .mechanism import SampledGaussian, Truncation, gaussian_precision

CONVERSIONS = ("exact", "cks", "bun_steinke")


class ZCDPAccountant(Accountant):
    """ρ-zCDP (Bun & Steinke 2016): the Gaussian costs ρ = sensitivity²/(2σ²), and ρ adds up.

    Amplification by sampling is not claimed: it does not exist for zCDP in general (Bun, Dwork, Rothblum, Steinke
    2018), so ``PoissonSampled`` and ``FixedSize`` are refused. Everything that is accepted is Gaussian, and a
    composition of Gaussians is one Gaussian with μ = √(2ρ), so ε can be exact:

    =============== ======================================================= ========================= ==============
    ``conversion``  ε at δ                                                  source                    ρ=0.5, δ=1e-5
    =============== ======================================================= ========================= ==============
    "exact"         solves δ = Φ(μ/2-ε/μ) - e^ε Φ(-μ/2-ε/μ), μ = √(2ρ)      Balle & Wang 2018, Th. 8  4.3772
    "cks"           min over α of ρα + log((α-1)/α) - (log δ+log α)/(α-1)   Canonne et al. 2020, P.12 4.7284
    "bun_steinke"   ρ + 2√(ρ log(1/δ))                                      Bun & Steinke 2016, P.1.3 5.2985
    =============== ======================================================= ========================= ==============

    "cks" and "bun_steinke" hold for every ρ-zCDP mechanism and are what other libraries print.
    """

    name = "zcdp"

    def __init__(self, conversion: str = "exact") -> None:
        super().__init__()
        if conversion not in CONVERSIONS:
            raise ValueError(f"conversion must be one of {', '.join(CONVERSIONS)}; got {conversion!r}.")
        self.conversion = conversion

    def _fresh(self) -> ZCDPAccountant:
        return ZCDPAccountant(self.conversion)

    @classmethod
    def _check(cls, event: Event) -> tuple[tuple[tuple[SampledGaussian | Truncation, int], ...], str]:
        parts, relation = super()._check(event)
        for mechanism, _ in parts:
            if isinstance(mechanism, Truncation) or mechanism.sampling != "none":
                raise UnsupportedEvent(
                    f"zCDP has no amplification by sampling, so it cannot bound {type(event).__name__}; use the 'rdp' "
                    "or 'pld' accountant, or compose the event without its sampling."
                )
        return parts, relation

    def get_rho(self, group_size: int = 1) -> float:
        """ρ of the whole history; grows with the square of ``group_size``."""
        return sum(gaussian_precision(part, count, group_size) for part, count in self._totals.items()) / 2

    def _epsilon(self, delta: float, group_size: int) -> float:
        return zcdp_to_epsilon(self.get_rho(group_size), delta, self.conversion)

    def _delta(self, epsilon: float, group_size: int) -> float:
        rho = self.get_rho(group_size)
        if self.conversion == "exact":
            return gaussian_delta(math.sqrt(2 * rho), epsilon)
        low, high = -700.0, 0.0
        if rho == 0:
            return 0.0
        if math.isinf(rho) or zcdp_to_epsilon(rho, math.exp(-1e-12), self.conversion) > epsilon:
            return 1.0
        while high - low > 1e-12:
            middle = (low + high) / 2
            if zcdp_to_epsilon(rho, math.exp(middle), self.conversion) <= epsilon:
                high = middle
            else:
                low = middle
        return math.exp(high)


def zcdp_to_epsilon(rho: float, delta: float, conversion: str = "exact") -> float:
    """ε at ``delta`` of a ρ-zCDP mechanism; "exact" requires a (composition of) Gaussian(s). See the table above."""
    if rho == 0 or math.isinf(rho):
        return rho
    if conversion == "exact":
        return gaussian_epsilon(math.sqrt(2 * rho), delta)
    if conversion == "bun_steinke":
        return rho + 2 * math.sqrt(rho * math.log(1 / delta))
    from .conversion import rdp_to_epsilon

    # Near the optimum of ρα + log(1/δ)/(α-1); zoomed in on because the other terms move it.
    centre, width = 0.5 * math.log(math.log(1 / delta) / rho + 1e-9), 6.0
    best = math.inf
    for _ in range(12):
        orders = 1 + np.exp(centre + width * np.linspace(-1, 1, 25))
        values = rdp_to_epsilon(orders, rho * orders, delta)
        index = int(np.argmin(values))
        best = min(best, float(values[index]))
        centre, width = math.log(orders[index] - 1), width / 4
    return best
