"""The independent ε against closed forms and another library, from above and from below."""

from __future__ import annotations

import math

import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paddle_privacy.accounting import (
    Composed,
    FixedSize,
    Gaussian,
    PoissonSampled,
    RDPAccountant,
    SelfComposed,
    ShuffledEpoch,
    TruncatedPoisson,
    get_accountant,
)
from paddle_privacy.audit.one_run import gaussian_epsilon
from paddle_privacy.verify.losses import COARSE, FINE, Part, epsilon_interval, parts_of


@pytest.mark.parametrize("mu", [0.05, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_gaussian_against_its_closed_form(mu, delta):
    found = epsilon_interval([Part(1.0, mu / 4, 16, True)], delta)
    exact = gaussian_epsilon(mu, delta)
    coarse = epsilon_interval([Part(1.0, mu / 4, 16, True)], delta, COARSE)
    assert coarse.low <= found.low <= exact <= found.high <= coarse.high
    assert found.high - found.low <= 0.01 * exact + 0.01


@pytest.mark.parametrize(
    "rate, sigma, count, delta",
    [
        (0.01, 1.0, 1000, 1e-5),
        (0.005, 0.8, 10000, 1e-6),
        (0.1, 4.0, 500, 1e-8),
        (0.5, 0.3, 3, 1e-5),
        (0.02, 20.0, 50, 1e-5),
    ],
)
def test_poisson_against_another_library(rate, sigma, count, delta):
    found = epsilon_interval([Part(rate, 1 / sigma, count, True)], delta)

    def google(pessimistic):
        return (
            privacy_loss_distribution.from_gaussian_mechanism(
                sigma,
                sampling_prob=rate,
                value_discretization_interval=1e-4 if sigma > 0.5 else 2e-3,
                pessimistic_estimate=pessimistic,
                use_connect_dots=pessimistic,
            )
            .self_compose(count)
            .get_epsilon_for_delta(delta)
        )

    above = google(True)
    assert found.low <= above, "a lower limit must not pass a proven upper bound"
    assert found.high >= above - 0.02 * above - 0.01, "and its upper end must not be far below one"
    assert found.high - found.low < 0.02 * above + 0.01


def test_never_above_any_accountant():
    """The lower limit is what makes verify fail, so it must stay below every sound accountant."""
    for event, count in (
        (PoissonSampled(0.02, Gaussian(0.7)), 300),
        (PoissonSampled(0.3, Composed((Gaussian(2.0), Gaussian(5.0)))), 40),
        (ShuffledEpoch(Gaussian(3.0)), 20),
        (TruncatedPoisson(0.01, 10_000, 250, Gaussian(1.0)), 100),
        (SelfComposed(PoissonSampled(0.05, Gaussian(1.1)), 7), 11),
        (Gaussian(4.0, "replace_one"), 10),
        (Composed((Gaussian(3.0), PoissonSampled(0.1, Gaussian(1.0)))), 10),
    ):
        found = epsilon_interval(parts_of(event.to_dict(), count), 1e-5)
        for name in ("rdp", "zcdp", "pld"):
            accountant = get_accountant(name)
            if accountant.supports(event):
                assert found.low <= accountant.compose(event, count).get_epsilon(1e-5) * (1 + 1e-9)
        assert found.low > 0


def test_sampling_without_a_known_worst_pair_is_one_sided():
    parts = parts_of(FixedSize(1000, 100, Gaussian(1.0)).to_dict(), 10)
    found = epsilon_interval(parts, 1e-5)
    assert not found.tight and found.low > 0


def test_edges():
    assert epsilon_interval([], 1e-5).high == 0
    assert epsilon_interval([Part(0.0, 1.0, 10, True)], 1e-5).high == 0
    assert math.isinf(epsilon_interval(parts_of(Gaussian(0.0).to_dict()), 1e-5).low)
    assert epsilon_interval([Part(0.01, 1.0, 0, True)], 1e-5).high == 0
    assert parts_of(SelfComposed(ShuffledEpoch(Gaussian(1.0)), 0).to_dict(), 5) == []
    with pytest.raises(ValueError, match="Laplace"):
        parts_of({"event": "Laplace", "scale": 1.0})
    with pytest.raises(ValueError, match="one event"):
        parts_of({"event": "PoissonSampled", "sample_rate": 0.1})


def test_a_small_delta_costs_no_more_time_or_memory():
    found = epsilon_interval([Part(0.001, 2.0, 100_000, True)], 1e-12)
    rdp = RDPAccountant().compose(PoissonSampled(0.001, Gaussian(0.5)), 100_000).get_epsilon(1e-12)
    assert 0 < found.low <= rdp


@given(
    rate=st.floats(-4, 0).map(lambda x: 10**x),
    sigma=st.floats(-0.5, 1.3).map(lambda x: 10**x),
    count=st.floats(0, 6).map(lambda x: int(10**x)),
    delta=st.floats(-9, -3).map(lambda x: 10**x),
)
@example(rate=0.001, sigma=1.0, count=618_355, delta=1e-5)
@settings(max_examples=25, deadline=None)
def test_the_lower_limit_holds_everywhere(rate, sigma, count, delta):
    """A false lower limit would condemn honest ledgers: it must stay below RDP's proven bound on both grids."""
    bound = RDPAccountant().step(sigma, rate, count).get_epsilon(delta)
    part = Part(rate, 1 / sigma, count, True)
    for grid in (COARSE, FINE):
        found = epsilon_interval([part], delta, grid)
        assert found.low <= bound * (1 + 1e-9)
        assert found.low <= found.high
