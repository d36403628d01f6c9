"""What an attacker can do, and what tuning costs, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from paddle_privacy.accounting import Gaussian, PLDAccountant, PoissonSampled, RDPAccountant
from paddle_privacy.tradeoff import max_true_positive_rate, posterior_belief
from paddle_privacy.tuning import expected_runs, gamma_for, random_search_epsilon

RATES = [0.001, 0.01, 0.1, 0.5]


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_gaussian_limit_is_the_neyman_pearson_curve(mu):
    exact = stats.norm.sf(stats.norm.isf(RATES) - mu)
    tight = max_true_positive_rate(PLDAccountant().compose(Gaussian(1 / mu)), RATES)
    assert (tight >= exact - 1e-9).all(), "a limit on attacks must not be below an attack that exists"
    assert tight == pytest.approx(exact, rel=0.03)
    loose = max_true_positive_rate(RDPAccountant().compose(Gaussian(1 / mu)), RATES)
    assert (loose >= tight - 1e-6).all()


def test_edges_of_the_curve():
    nothing = max_true_positive_rate(RDPAccountant(), RATES)
    assert nothing == pytest.approx(RATES)
    everything = max_true_positive_rate(RDPAccountant().compose(Gaussian(0.0)), RATES)
    assert everything == pytest.approx([1.0] * 4)
    sampled = max_true_positive_rate(RDPAccountant().compose(PoissonSampled(0.01, Gaussian(1.0)), 100), RATES)
    assert (np.diff(sampled) > 0).all()
    with pytest.raises(ValueError, match="false_positive_rates"):
        max_true_positive_rate(RDPAccountant(), [1.5])


def test_posterior():
    assert posterior_belief(0.0) == 0.5
    assert posterior_belief(math.log(3)) == pytest.approx(0.75)
    assert posterior_belief(1.0, prior=0.1) == pytest.approx(0.1 * math.e / (0.9 + 0.1 * math.e))
    assert posterior_belief(math.inf) == 1.0
    with pytest.raises(ValueError, match="prior"):
        posterior_belief(1.0, 0.0)


class TestTuning:
    @pytest.mark.parametrize("eta", [-0.5, 0.0, 1.0, 3.0])
    def test_the_law_has_the_mean_asked_for(self, eta):
        for mean in (1.5, 10.0, 300.0):
            gamma = gamma_for(mean, eta)
            assert expected_runs(eta, gamma) == pytest.approx(mean, rel=1e-6)

    def test_geometric_mean(self):
        assert expected_runs(1.0, 0.2) == pytest.approx(5.0)

    def test_the_bound_is_the_theorem(self):
        """Theorem 2 at chosen orders cannot be below the optimised bound; one run is its floor."""
        one = RDPAccountant().compose(PoissonSampled(0.01, Gaussian(1.0)), 1000)
        delta, mean, eta = 1e-6, 20.0, 1.0
        found = random_search_epsilon(one, delta, mean, eta)
        gamma = gamma_for(mean, eta)
        for order in (4.0, 8.0, 16.0):
            for other in (4.0, 8.0, 64.0):
                rho, rho_other = (float(one.get_rdp([x])[0]) for x in (order, other))
                total = (
                    rho
                    + (1 + eta) * (1 - 1 / other) * rho_other
                    + (1 + eta) * math.log(1 / gamma) / other
                    + math.log(mean) / (order - 1)
                )
                epsilon = total + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
                assert found <= epsilon * (1 + 1e-3)
        assert one.get_epsilon(delta) < found

    def test_many_runs_cost_less_than_composing_them(self):
        event = PoissonSampled(0.01, Gaussian(1.0))
        one = RDPAccountant().compose(event, 500)
        composed = RDPAccountant().compose(event, 500 * 100).get_epsilon(1e-6)
        assert random_search_epsilon(one, 1e-6, 100.0) < composed

    def test_refusals(self):
        with pytest.raises(ValueError, match="mean"):
            gamma_for(0.5, 1.0)
        with pytest.raises(ValueError, match="eta"):
            gamma_for(2.0, -1.0)
