"""Reference values computed once with independent code: RDP at real orders by quadrature (checked with mpmath)."""

from __future__ import annotations

import pytest

from paddle_privacy.accounting import (
    Gaussian,
    RDPAccountant,
    ShuffledEpoch,
    ZCDPAccountant,
    calibrate_noise_multiplier,
    compute_epsilon,
    get_noise_multiplier,
)

# q, σ, steps, δ; best ε over 156 fixed orders, best over a denser grid, ε from the privacy loss distribution.
POISSON = [
    (1e-4, 0.5, 10_000, 1e-6, 3.4216965570632025, 3.42346842072977, 1.9533),
    (1e-4, 1.0, 100_000, 1e-6, 0.61761933989919, 0.61761933989919, 0.1651),
    (1e-3, 0.5, 1_000, 1e-5, 4.38202303255658, 4.378212696533751, 3.2389),
    (1e-3, 1.0, 100_000, 1e-6, 2.004045592380869, 2.004045592380869, 1.862),
    (1e-3, 0.3, 100, 1e-5, 14.236016518077584, 14.06066965824818, 11.0406),
    (1e-2, 0.8, 1_000, 1e-6, 4.293340801757799, 4.293648935632104, 3.7062),
    (1e-2, 1.2, 3_750, 1e-5, 2.8436059442525177, 2.843547454589574, 2.6026),
    (1e-2, 1.1, 3_750, 1e-5, 3.2985277769486308, 3.2985604033129565, 3.0162),
    (256 / 9600, 1.0, 375, 1e-5, 3.7248689023949164, 3.724663810347969, 3.2936),
    (256 / 9600, 1.5, 3_750, 1e-6, 6.752209813224046, 6.752306259281868, 6.3022),
    (256 / 9600, 20.0, 3_750, 1e-10, 0.49966048456227846, 0.49090085449488363, 0.4674),
    (0.1, 1.0, 1_000, 1e-5, 27.163494340026904, 27.151844932250505, 25.2046),
    (0.1, 0.3, 1, 1e-5, 16.331809523770183, 16.32751878879568, 14.9816),
    (0.1, 1.5, 1, 1e-10, 2.0414615160385554, 2.0414615160385554, 1.8199),
    (1.0, 4.0, 100, 1e-5, 14.132226163159334, 14.130789889358418, 13.2068),
    (1.0, 0.5, 1, 1e-6, 11.68862679916635, 11.688987481777556, 10.9972),
    (1.0, 20.0, 1, 1e-10, 0.29525777266512243, 0.2948631362784201, 0.2804),
]
# σ, steps, δ, ρ; exact ε, Bun-Steinke ε, ε at the best order.
ZCDP = [
    (1.0, 1, 1e-5, 0.5, 4.377178095681137, 5.298525912188081, 4.728386984943314),
    (20.0, 1_000, 1e-6, 1.25, 8.306225049954731, 9.56129068134555, 8.845889348462379),
    (20.0, 100_000, 1e-5, 125.0, 191.5492014327113, 200.8713564692573, 198.53553357645708),
    (2.0, 10, 1e-5, 1.25, 7.511275900744785, 8.83713564692573, 8.078359548144446),
]
# ε at δ = 1e-5; σ by RDP for 375 steps of rate 256/9600, σ for 10 unamplified participations.
CALIBRATION = [
    (0.5, 4.118395861413946, 22.236588406370622),
    (2.0, 1.3979047017884367, 6.304988555424239),
    (8.0, 0.727045844573639, 1.8980909859983384),
]
# The orders behind the "156 fixed orders" column.
FIXED_ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]


@pytest.mark.parametrize("q, sigma, steps, delta, on_grid, dense, pld", POISSON)
def test_rdp_is_exact_on_fixed_orders_and_better_on_free_ones(q, sigma, steps, delta, on_grid, dense, pld):
    assert len(FIXED_ORDERS) == 156
    fixed = RDPAccountant(FIXED_ORDERS).step(sigma, q, steps).get_epsilon(delta)
    assert fixed == pytest.approx(on_grid, rel=1e-9)
    free = compute_epsilon(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta)
    assert free <= min(on_grid, dense) + 1e-6
    assert free >= pld - 1e-4


@pytest.mark.parametrize("sigma, steps, delta, rho, exact, bun_steinke, best_order", ZCDP)
def test_zcdp_conversions(sigma, steps, delta, rho, exact, bun_steinke, best_order):
    for conversion, expected in (("exact", exact), ("bun_steinke", bun_steinke), ("cks", best_order)):
        accountant = ZCDPAccountant(conversion).compose(Gaussian(sigma), steps)
        assert accountant.get_rho() == pytest.approx(rho, rel=1e-12)
        epsilon = accountant.get_epsilon(delta)
        assert epsilon == pytest.approx(expected, rel=1e-9)
        assert epsilon >= expected * (1 - 1e-14)
        assert accountant.get_delta(epsilon) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("target, sigma_rdp, sigma_unamplified", CALIBRATION)
def test_calibration_meets_the_reference_and_never_overshoots(target, sigma_rdp, sigma_unamplified):
    sigma = get_noise_multiplier(target_epsilon=target, target_delta=1e-5, sample_rate=256 / 9600, steps=375)
    assert sigma == pytest.approx(sigma_rdp, rel=1e-4)
    assert compute_epsilon(noise_multiplier=sigma, sample_rate=256 / 9600, steps=375, delta=1e-5) <= target
    unamplified = calibrate_noise_multiplier(
        lambda s: ShuffledEpoch(Gaussian(s)), target_epsilon=target, target_delta=1e-5, count=10, accountant="zcdp"
    )
    assert sigma_unamplified <= unamplified <= sigma_unamplified * (1 + 1.1e-5)
