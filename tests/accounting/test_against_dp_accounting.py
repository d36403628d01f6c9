"""Ours beside Google's dp-accounting on drawn settings; a systematic difference is explained where it is allowed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paddle_privacy.accounting import FixedSize, Gaussian, PLDAccountant, PoissonSampled, RDPAccountant

# Their default grid of losses. Its pessimism grows with the steps: see the allowance below.
INTERVAL = 1e-4

drawn = {
    "rate": st.floats(1e-3, 1.0),
    "sigma": st.floats(0.5, 8.0),
    "steps": st.integers(1, 300),
    "delta": st.sampled_from([1e-4, 1e-6, 1e-9]),
}


def google_event(rate, sigma):
    return dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))


@given(**drawn)
@settings(max_examples=60, deadline=None)
def test_renyi_on_integer_orders_agrees(rate, sigma, steps, delta):
    orders = [2, 3, 4, 6, 9, 16, 33, 64]
    theirs = google_rdp.RdpAccountant(orders).compose(google_event(rate, sigma), steps).get_epsilon(delta)
    ours = RDPAccountant(orders).step(sigma, rate, steps).get_epsilon(delta)
    assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-9)


@given(**drawn)
@settings(max_examples=15, deadline=None)
def test_renyi_on_fractional_orders_is_never_looser(rate, sigma, steps, delta):
    orders = [1.2, 1.5, 2.7, 5.5, 10.9]
    theirs = google_rdp.RdpAccountant(orders).compose(google_event(rate, sigma), steps).get_epsilon(delta)
    ours = RDPAccountant(orders).step(sigma, rate, steps).get_epsilon(delta)
    # Their series at fractional orders adds absolute values of terms that alternate in sign, so it can be looser (9% of
    # the divergence at order 1.4 for small σ). It is never tighter.
    assert ours <= theirs * (1 + 1e-8) + 1e-12
    default = google_rdp.RdpAccountant().compose(google_event(rate, sigma), steps).get_epsilon(delta)
    assert RDPAccountant().step(sigma, rate, steps).get_epsilon(delta) <= default + 1e-6


@given(**{**drawn, "sigma": st.floats(0.8, 8.0)})
@settings(max_examples=4, deadline=None)
def test_loss_distributions_agree(rate, sigma, steps, delta):
    ours = PLDAccountant().step(sigma, rate, steps)
    low, high = ours.get_epsilon_bounds(delta)
    assume(0 < high < 60)
    theirs = (
        google_pld.from_gaussian_mechanism(sigma, sampling_prob=rate, value_discretization_interval=INTERVAL)
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
    )
    # Both are upper bounds on the same number; theirs also truncates tails of 1e-15, which δ = 1e-9 does not notice.
    assert theirs >= low - 1e-6
    assert high <= theirs + 1e-4
    # Their grid adds steps·interval²/12·(1 + θ) to ε, where θ = -d log δ/dε.
    slope = math.log(ours.get_delta(max(high - 0.01, 0)) / ours.get_delta(high + 0.01)) / 0.02
    assert high >= theirs - steps * INTERVAL**2 / 6 * (1 + slope) - 1e-4


@pytest.mark.parametrize("rate, sigma, steps", [(0.02, 1.0, 300), (0.5, 2.0, 10)])
def test_replace_one_agrees(rate, sigma, steps):
    theirs = google_pld.from_gaussian_mechanism(
        sigma, sampling_prob=rate, neighboring_relation=NeighboringRelation.REPLACE_ONE
    ).self_compose(steps)
    ours = PLDAccountant().compose(PoissonSampled(rate, Gaussian(sigma, "replace_one")), steps)
    assert ours.get_epsilon(1e-5) == pytest.approx(theirs.get_epsilon_for_delta(1e-5), abs=2e-4)


def test_group_privacy_is_their_mixture_of_gaussians():
    rate, sigma, steps, group = 0.01, 3.0, 300, 2
    weights = [math.comb(group, j) * rate**j * (1 - rate) ** (group - j) for j in range(group + 1)]
    theirs = google_pld.from_mixture_gaussian_mechanism(sigma, list(range(group + 1)), weights).self_compose(steps)
    ours = PLDAccountant().step(sigma, rate, steps)
    assert ours.get_epsilon(1e-6, group_size=group) == pytest.approx(theirs.get_epsilon_for_delta(1e-6), abs=2e-4)
    single = PLDAccountant().step(sigma, rate, steps).get_epsilon(1e-6)
    assert RDPAccountant().step(sigma, rate, steps).get_epsilon(1e-6, group) >= ours.get_epsilon(1e-6, group) > single


def test_noise_and_batch_schedules_agree():
    schedule = [(0.01, 1.0, 100), (0.02, 1.3, 80), (0.04, 2.0, 60), (1.0, 9.0, 3)]
    ours, theirs = PLDAccountant(), google_pld.identity()
    for rate, sigma, steps in schedule:
        ours.step(sigma, rate, steps)
        theirs = theirs.compose(google_pld.from_gaussian_mechanism(sigma, sampling_prob=rate).self_compose(steps))
    assert ours.get_epsilon(1e-6) == pytest.approx(theirs.get_epsilon_for_delta(1e-6), abs=2e-4)


def test_sampling_without_replacement_is_not_looser_than_their_renyi_bound():
    size, batch, sigma, steps = 1000, 20, 2.0, 100
    event = dp_event.SampledWithoutReplacementDpEvent(size, batch, dp_event.GaussianDpEvent(sigma))
    # Their bound (Wang, Balle, Kasiviswanathan 2019) takes σ relative to how far replacing one row moves the sum, ours
    # relative to the clip norm, which is half of that.
    theirs = (
        google_rdp.RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
        .compose(event, steps)
        .get_epsilon(1e-5)
    )
    ours = FixedSize(size, batch, Gaussian(2 * sigma, "replace_one"))
    renyi, numeric = RDPAccountant().compose(ours, steps), PLDAccountant().compose(ours, steps)
    assert 0 < numeric.get_epsilon(1e-5) <= renyi.get_epsilon(1e-5) <= theirs * (1 + 1e-6)


def test_our_defaults_gain_what_a_fixed_grid_of_orders_loses():
    # Stopping at order 63 costs 24% here.
    orders = np.concatenate([np.arange(1.1, 11, 0.1), np.arange(11, 64)])
    short = RDPAccountant(orders).step(20.0, 1.0, 1).get_epsilon(1e-10)
    assert RDPAccountant().step(20.0, 1.0, 1).get_epsilon(1e-10) < 0.85 * short
