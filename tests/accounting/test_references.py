"""Every accountant against reference values from independent code."""

from __future__ import annotations

import pytest
from accounting.references import CALIBRATION, FINER_PLD, FIXED_ORDERS, GAUSSIAN, POISSON, ZCDP

from paddle_privacy.accounting import (
    Gaussian,
    PLDAccountant,
    RDPAccountant,
    ShuffledEpoch,
    ZCDPAccountant,
    calibrate_noise_multiplier,
    compute_epsilon,
    get_noise_multiplier,
)

RATE = 256 / 9600


@pytest.mark.parametrize("q, sigma, steps, delta, on_grid, dense, pld", POISSON)
def test_rdp_is_exact_on_fixed_orders_and_better_on_free_ones(q, sigma, steps, delta, on_grid, dense, pld):
    assert len(FIXED_ORDERS) == 156
    fixed = RDPAccountant(FIXED_ORDERS).step(sigma, q, steps).get_epsilon(delta)
    assert fixed == pytest.approx(on_grid, rel=1e-9)
    free = compute_epsilon(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta)
    assert free <= min(on_grid, dense) + 1e-6
    assert free >= pld - 1e-4


@pytest.mark.parametrize("q, sigma, steps, delta, on_grid, dense, pld", POISSON)
def test_pld_lands_on_the_reference(q, sigma, steps, delta, on_grid, dense, pld):
    accountant = PLDAccountant().step(sigma, q, steps)
    lower, upper = accountant.get_epsilon_bounds(delta)
    assert lower <= upper <= pld + 2e-4
    finer = FINER_PLD.get((q, sigma, steps, delta))
    if finer is None:
        # The references are rounded up to 1e-4.
        assert upper >= pld - 2e-4
    else:
        assert finer - 2e-4 <= upper <= finer + 5e-5
    assert upper - lower <= 0.05 * upper
    # δ and ε are inverse to each other, and δ is not flattered either.
    assert delta * (1 - 1e-3) <= accountant.get_delta(upper) <= delta * (1 + 1e-3)


@pytest.mark.parametrize("sigma, steps, delta, exact", GAUSSIAN)
@pytest.mark.parametrize("make", [PLDAccountant, ZCDPAccountant])
def test_the_unsampled_gaussian_is_exact_and_never_below(make, sigma, steps, delta, exact):
    epsilon = make().step(sigma, 1.0, steps).get_epsilon(delta)
    assert exact <= epsilon <= exact * (1 + 1e-9)


@pytest.mark.parametrize("sigma, steps, delta, rho, exact, bun_steinke, best_order", ZCDP)
def test_zcdp_conversions(sigma, steps, delta, rho, exact, bun_steinke, best_order):
    for conversion, expected in (("exact", exact), ("bun_steinke", bun_steinke), ("cks", best_order)):
        accountant = ZCDPAccountant(conversion).compose(Gaussian(sigma), steps)
        assert accountant.get_rho() == pytest.approx(rho, rel=1e-12)
        epsilon = accountant.get_epsilon(delta)
        assert expected * (1 - 1e-14) <= epsilon <= expected * (1 + 1e-9)
        assert accountant.get_delta(epsilon) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("target, sigma_rdp, sigma_pld, sigma_unamplified", CALIBRATION)
def test_calibration_meets_the_reference_and_never_overshoots(target, sigma_rdp, sigma_pld, sigma_unamplified):
    for name, expected in (("rdp", sigma_rdp), ("pld", sigma_pld)):
        sigma = get_noise_multiplier(
            target_epsilon=target, target_delta=1e-5, sample_rate=RATE, steps=375, accountant=name
        )
        assert sigma == pytest.approx(expected, rel=1e-4)
        spent = compute_epsilon(noise_multiplier=sigma, sample_rate=RATE, steps=375, delta=1e-5, accountant=name)
        assert 0.999 * target <= spent <= target
    for name in ("zcdp", "pld"):
        unamplified = calibrate_noise_multiplier(
            lambda s: ShuffledEpoch(Gaussian(s)), target_epsilon=target, target_delta=1e-5, count=10, accountant=name
        )
        assert sigma_unamplified <= unamplified <= sigma_unamplified * (1 + 1.1e-5)
