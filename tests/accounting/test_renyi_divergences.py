"""Rényi divergences against arbitrary-precision quadrature and against closed forms."""

from __future__ import annotations

import mpmath as mp
import numpy as np
import pytest

from paddle_privacy.accounting import FixedSize, Gaussian, PoissonSampled, RDPAccountant
from paddle_privacy.accounting.conversion import rdp_to_delta, rdp_to_epsilon
from paddle_privacy.accounting.mechanism import SampledGaussian
from paddle_privacy.accounting.pairs import dominating_pairs
from paddle_privacy.accounting.rdp import integer_log_moment, pair_rdp, poisson_gaussian_rdp


def density(mixture, sigma, x):
    return sum(mp.mpf(w) * mp.exp(-((x - m) ** 2) / (2 * mp.mpf(sigma) ** 2)) for w, m in mixture) / (
        mp.mpf(sigma) * mp.sqrt(2 * mp.pi)
    )


def renyi(p, q, sigma, order, low, high, turns=()):
    """log ∫ p^α q^{1-α} / (α - 1), 30 digits."""
    with mp.workdps(30):
        order = mp.mpf(order)
        pieces = sorted({mp.mpf(low), mp.mpf(high), *map(mp.mpf, turns), *map(mp.mpf, np.arange(low, high, 2 * sigma))})
        moment = mp.quad(lambda x: density(p, sigma, x) ** order * density(q, sigma, x) ** (1 - order), pieces)
        return float(mp.log(moment) / (order - 1))


@pytest.mark.parametrize(
    "q, sigma, order",
    [
        (0.01, 1.0, 1.5),
        (0.5, 1.0, 1.5),
        (0.5, 0.3, 1.4),
        (1e-4, 0.5, 3.3),
        (1e-6, 1.0, 2.5),
        (0.9, 2.0, 7.7),
        (1e-3, 0.1, 1.2),
        (0.02, 20.0, 60.5),
        (0.3, 5.0, 1.01),
    ],
)
def test_poisson_divergence_at_real_orders(q, sigma, order):
    turn = sigma**2 * np.log((1 - q) / q) + 0.5
    with mp.workdps(30):
        rest = 1 - mp.mpf(q)
    exact = renyi([(rest, 0), (q, 1)], [(1, 0)], sigma, order, -14 * sigma, max(order, 2) + 14 * sigma, [turn])
    ours = poisson_gaussian_rdp(q, sigma, np.array([order]))[0]
    assert exact * (1 - 1e-13) <= ours <= exact * (1 + 1e-10)


@pytest.mark.parametrize("q, sigma", [(0.01, 1.0), (0.3, 0.4), (1e-5, 3.0), (0.7, 0.2), (0.02, 20.0)])
def test_poisson_divergence_at_integers_is_the_binomial_sum(q, sigma):
    orders = np.array([2, 3, 5, 8, 17, 40], dtype=float)
    sums = [integer_log_moment(q, sigma, int(order)) / (order - 1) for order in orders]
    # The sum loses digits where the divergence is small; quadrature of the excess does not.
    np.testing.assert_allclose(poisson_gaussian_rdp(q, sigma, orders), sums, rtol=1e-9, atol=1e-15)


def test_small_noise_interpolates_from_above():
    orders = np.array([2.0])
    bound = poisson_gaussian_rdp(0.01, 0.045, orders)
    exact = [
        renyi([(0.99, 0), (0.01, 1)], [(1, 0)], 0.045, order, -0.45, 2.45, [0.5 + 0.045**2 * np.log(99)])
        for order in orders
    ]
    assert (bound >= np.array(exact) * (1 - 1e-9)).all()
    assert bound[0] == pytest.approx(exact[0], rel=1e-9)
    # Between integers the log-moment is convex: halfway it is at most the mean of its neighbours.
    three, between = poisson_gaussian_rdp(0.01, 0.045, np.array([3.0, 2.5])) * [2, 1.5]
    assert between == pytest.approx((bound[0] + three) / 2, rel=1e-9)


@pytest.mark.parametrize("order", [1.2, 3.7])
def test_divergence_of_pairs_by_another_quadrature(order):
    q, sigma = 0.05, 0.9
    poisson = SampledGaussian("poisson", q, sigma, "add_or_remove_one")
    removal, addition = dominating_pairs(poisson)
    exact = poisson_gaussian_rdp(q, sigma, np.array([order]))[0]
    assert pair_rdp(removal, [order])[0] == pytest.approx(exact, rel=1e-9)
    # Removal is the larger direction (Mironov, Talwar, Zhang 2019, Theorem 5).
    assert pair_rdp(addition, [order])[0] <= exact
    replaced = dominating_pairs(SampledGaussian("poisson", q, sigma, "replace_one"))[0]
    reference = renyi([(1 - q, 0), (q, 1)], [(1 - q, 0), (q, -1)], sigma, order, -13, 13 + 2 * order)
    assert pair_rdp(replaced, [order])[0] == pytest.approx(reference, rel=1e-8)
    group = dominating_pairs(poisson, 2)[0]
    three = [((1 - q) ** 2, 0), (2 * q * (1 - q), 1), (q * q, 2)]
    assert pair_rdp(group, [order])[0] == pytest.approx(
        renyi(three, [(1, 0)], sigma, order, -13, 13 + 2 * order), rel=1e-8
    )


def test_fixed_size_divergence_joins_two_half_lines():
    # For losses > 0 the pair is ((1-γ)N(0) + γN(2), N(0)); for losses < 0 it is that pair reversed.
    gamma, sigma, order = 0.1, 1.5, 3.0
    with mp.workdps(25):
        up, zero = [(1 - mp.mpf(gamma), 0), (gamma, 2)], [(1, 0)]

        def p_to_q(p, q):
            return lambda x: density(p, sigma, x) ** order * density(q, sigma, x) ** (1 - order)

        rises = mp.quad(p_to_q(up, zero), [1, 3, 6, 9, 30])
        falls = mp.quad(p_to_q(zero, up), [1, 3, 6, 9, 30])
        atom = (
            1
            - mp.quad(lambda x: density(up, sigma, x), [1, 5, 30])
            - mp.quad(lambda x: density(zero, sigma, x), [1, 5, 30])
        )
        exact = float(mp.log(rises + falls + atom) / (order - 1))
    event = FixedSize(100, 10, Gaussian(sigma, "replace_one"))
    assert RDPAccountant().compose(event).get_rdp([order])[0] == pytest.approx(exact, rel=1e-8)


def test_q_one_is_the_gaussian_and_q_zero_costs_nothing():
    orders = [1.1, 2.0, 30.5]
    full = RDPAccountant().compose(PoissonSampled(1.0, Gaussian(2.0))).get_rdp(orders)
    np.testing.assert_allclose(full, np.array(orders) / 8, rtol=1e-14)
    assert not RDPAccountant().compose(PoissonSampled(0.0, Gaussian(2.0)), 1000).get_rdp(orders).any()


def test_conversion_is_inverse_and_knows_zero():
    orders = np.array([1.5, 3.0, 20.0, 300.0])
    rdp = np.array([0.01, 0.05, 0.4, 9.0])
    for delta in (1e-3, 1e-9):
        for order, divergence, epsilon in zip(orders, rdp, rdp_to_epsilon(orders, rdp, delta)):
            if epsilon > 0:
                back = rdp_to_delta(np.array([order]), np.array([divergence]), epsilon)[0]
                assert back <= delta * (1 + 1e-9)
    # Total variation √(1 - e^{-ρ}) below δ: ε = 0.
    assert rdp_to_epsilon(np.array([2.0]), np.array([1e-12]), 1e-5)[0] == 0.0
