"""What holds for every accountant: monotonicity, composition, limits, bookkeeping."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_privacy.accounting import (
    Composed,
    FixedSize,
    Gaussian,
    PLDAccountant,
    PoissonSampled,
    RDPAccountant,
    SelfComposed,
    ShuffledEpoch,
    TruncatedPoisson,
    ZCDPAccountant,
    compute_delta,
    compute_epsilon,
    epsilon_curve,
    get_accountant,
)

NAMES = ("rdp", "pld", "zcdp")
SAMPLING = ("rdp", "pld")


def epsilon(name, sigma=1.1, rate=0.02, steps=200, delta=1e-5, **options):
    return compute_epsilon(
        noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant=name, **options
    )


@given(
    rate=st.floats(1e-4, 1.0),
    sigma=st.floats(0.5, 10),
    steps=st.integers(1, 2000),
    delta=st.sampled_from([1e-3, 1e-5, 1e-10]),
)
@settings(max_examples=12, deadline=None)
def test_more_of_anything_that_hurts_never_costs_less(rate, sigma, steps, delta):
    for name in SAMPLING:
        # The numerical bound is exact up to its tolerance.
        slack = 1e-9 if name == "rdp" else 1e-4
        base = epsilon(name, sigma, rate, steps, delta)
        assert 0 <= base < math.inf
        assert epsilon(name, sigma, min(1.0, rate * 1.3), steps, delta) >= base - slack
        assert epsilon(name, sigma / 1.3, rate, steps, delta) >= base - slack
        assert epsilon(name, sigma, rate, steps * 2, delta) >= base - slack
        assert epsilon(name, sigma, rate, steps, delta / 10) >= base - slack
        assert epsilon(name, sigma, rate, steps, delta, group_size=2) >= base - slack
    # The loss distribution is never looser than the Rényi bound, up to its tolerance.
    assert epsilon("pld", sigma, rate, steps, delta) <= epsilon("rdp", sigma, rate, steps, delta) + 1e-4


PIECES = [
    PoissonSampled(0.02, Gaussian(1.0)),
    PoissonSampled(0.05, Gaussian(2.0)),
    Gaussian(15.0),
    TruncatedPoisson(0.01, 1000, 60, Gaussian(1.5)),
]


@pytest.mark.parametrize("name", SAMPLING)
def test_order_and_grouping_do_not_matter(name):
    counts = [30, 20, 4, 10]
    forward, backward, nested, single = (get_accountant(name) for _ in range(4))
    for event, count in zip(PIECES, counts):
        forward.compose(event, count)
        nested.compose(Composed((SelfComposed(event, count),)))
        for _ in range(count):
            single.compose(event)
    for event, count in zip(reversed(PIECES), reversed(counts)):
        backward.compose(event, count)
    answers = [accountant.get_epsilon(1e-5) for accountant in (forward, backward, nested, single)]
    np.testing.assert_allclose(answers, answers[0], rtol=1e-6)
    deltas = [accountant.get_delta(2.0) for accountant in (forward, backward, nested, single)]
    np.testing.assert_allclose(deltas, deltas[0], rtol=1e-4)
    assert single.history == forward.history == list(zip(PIECES, counts))


@pytest.mark.parametrize("name", SAMPLING)
def test_limits(name):
    assert epsilon(name, sigma=0.0) == math.inf
    assert epsilon(name, sigma=0.0, rate=0.0) == 0.0
    assert epsilon(name, steps=0) == 0.0
    assert epsilon(name, rate=0.0) == 0.0
    assert get_accountant(name).get_epsilon(1e-5) == 0.0 and get_accountant(name).get_delta(0.0) == 0.0
    assert get_accountant(name).step(0.0, 0.5).get_delta(3.0) == 1.0
    full = get_accountant(name).compose(PoissonSampled(1.0, Gaussian(2.0)), 7).get_epsilon(1e-5)
    assert full == get_accountant(name).compose(Gaussian(2.0), 7).get_epsilon(1e-5)
    nearly = epsilon(name, sigma=2.0, rate=1 - 1e-9, steps=7)
    assert nearly == pytest.approx(full, rel=1e-3)


def test_zcdp_limits():
    assert ZCDPAccountant().compose(Gaussian(0.0)).get_epsilon(1e-5) == math.inf
    assert ZCDPAccountant().get_epsilon(1e-5) == 0.0
    assert ZCDPAccountant().compose(Gaussian(1e9)).get_epsilon(1e-5) == 0.0
    for conversion in ("exact", "cks", "bun_steinke"):
        # Replacing a row moves the sum twice as far: four times the ρ (a known library bug forgets it).
        one = ZCDPAccountant(conversion).compose(Gaussian(3.0))
        two = ZCDPAccountant(conversion).compose(Gaussian(3.0, "replace_one"))
        assert two.get_rho() == pytest.approx(4 * one.get_rho())
        assert two.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5, group_size=2), rel=1e-9)


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize(
    "sigma, rate, steps, delta",
    [
        (1.0, 1e-7, 10**8, 1e-6),  # tiny rate, huge number of steps
        (0.8, 1e-5, 10**6, 1e-15),
        (1e6, 0.5, 1000, 1e-5),  # huge noise
        (20.0, 1.0, 10**6, 1e-15),
        (1.0, 0.5, 10, 1e-15),
        (0.1, 0.01, 10, 1e-5),  # small noise
        (0.01, 0.001, 1, 1e-15),
        (1.0, 0.01, 1, 0.4),
        (5.0, 0.999999, 50, 1e-8),
        (1e-5, 0.5, 1, 1e-5),
    ],
)
def test_extreme_settings_neither_warn_nor_fail(name, sigma, rate, steps, delta):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accountant = get_accountant(name).step(sigma, rate, steps)
        value = accountant.get_epsilon(delta)
        assert value >= 0 and not math.isnan(value)
        assert 0 <= accountant.get_delta(min(value, 1e3) + 0.1) <= 1
        assert accountant.get_epsilon(delta / 3) >= value * (1 - 1e-6) - 1e-6


def test_bounds_bracket_and_tighten():
    accountant = PLDAccountant().step(1.0, 0.01, 500)
    coarse = PLDAccountant(tolerance=1e-2).step(1.0, 0.01, 500)
    low, high = accountant.get_epsilon_bounds(1e-6)
    coarse_low, coarse_high = coarse.get_epsilon_bounds(1e-6)
    assert coarse_low <= high and low <= coarse_high and high - low < 2e-4
    assert high <= coarse_high + 2e-5


def test_many_distinct_noise_levels_are_grouped_soundly():
    accountant, few = PLDAccountant(), PLDAccountant()
    for i in range(60):
        accountant.step(1.0 + 0.004 * i, 0.01 - 2e-5 * i, 2)
    low, high = accountant.get_epsilon_bounds(1e-5)
    # Everything at the most expensive and at the cheapest setting brackets it.
    few.step(1.0, 0.01, 120)
    cheap = PLDAccountant().step(1.24, 0.0088, 120)
    assert cheap.get_epsilon(1e-5) < low <= high < few.get_epsilon(1e-5)
    assert high == pytest.approx(low, rel=0.02)


def test_truncation_adds_its_own_probability():
    plain = RDPAccountant().step(1.0, 0.01, 100)
    rare = RDPAccountant().compose(TruncatedPoisson(0.01, 10_000, 180, Gaussian(1.0)), 100)
    often = RDPAccountant().compose(TruncatedPoisson(0.01, 10_000, 110, Gaussian(1.0)), 100)
    never = RDPAccountant().compose(TruncatedPoisson(0.01, 100, 200, Gaussian(1.0)), 100)
    epsilon_plain = plain.get_epsilon(1e-5)
    assert epsilon_plain < rare.get_epsilon(1e-5) < epsilon_plain * 1.001
    assert often.get_epsilon(1e-5) == math.inf  # truncation happens often: this bound proves nothing
    assert never.get_epsilon(1e-5) == pytest.approx(epsilon_plain, rel=1e-12)
    value = rare.get_epsilon(1e-5)
    # δ(ε) + (1 + e^ε)·T·P[Binomial(N + 1, q) > B]
    from scipy.stats import binom

    slack = (1 + math.exp(value)) * 100 * binom.sf(180, 10_001, 0.01)
    assert plain.get_delta(value) + slack == pytest.approx(rare.get_delta(value), rel=1e-6)
    # Each question optimises its own Rényi order, so one is the inverse of the other to about 1e-6.
    assert rare.get_delta(value) <= 1e-5 * (1 + 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_state_restores_exactly_and_copies_are_independent(name):
    accountant = get_accountant(name).compose(Gaussian(4.0), 3).compose(ShuffledEpoch(Gaussian(5.0)), 2)
    if name != "zcdp":
        accountant.step(1.0, 0.01, 10).compose(FixedSize(100, 3, Gaussian(2.0)), 5)
    state = json.loads(json.dumps(accountant.state_dict()))
    restored = get_accountant(name)
    restored.compose(Gaussian(1.0))
    restored.load_state_dict(state)
    assert restored.state_dict() == accountant.state_dict() and restored.history == accountant.history
    assert restored.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)
    assert restored.relation == accountant.relation == "zero_out"
    before = accountant.get_epsilon(1e-5)
    peek = accountant.copy().compose(Gaussian(4.0), 5)
    assert peek.get_epsilon(1e-5) > before == accountant.get_epsilon(1e-5)
    assert len(peek) == len(accountant) + 5
    with pytest.raises(ValueError, match="relation"):
        restored.load_state_dict({**state, "relation": "add_or_remove_one"})
    with pytest.raises(ValueError, match="version"):
        restored.load_state_dict({**state, "version": 99})
    assert restored.history == accountant.history


def test_history_merges_runs():
    accountant = RDPAccountant()
    first, second = PoissonSampled(0.1, Gaussian(1.0)), PoissonSampled(0.1, Gaussian(2.0))
    for event in (first, first, second, first, first):
        accountant.compose(event)
    accountant.compose(first, 0)
    assert accountant.history == [(first, 2), (second, 1), (first, 2)]
    accountant.history.clear()
    assert len(accountant) == 5


def test_queries_between_steps_equal_one_query_at_the_end():
    asked, silent = RDPAccountant(), RDPAccountant()
    for i in range(24):
        asked.step(1.0 + 0.01 * (i % 3), 0.01)
        asked.get_epsilon(1e-5)
        asked.get_epsilon(1e-5, group_size=2)
    for i in range(24):
        silent.step(1.0 + 0.01 * (i % 3), 0.01)
    assert asked.get_epsilon(1e-5) == pytest.approx(silent.get_epsilon(1e-5), rel=1e-12)
    assert asked.get_epsilon(1e-5, group_size=2) == pytest.approx(silent.get_epsilon(1e-5, group_size=2), rel=1e-12)


@pytest.mark.parametrize("q, sigma, delta", [(0.01, 1.1, 1e-5), (1.0, 20.0, 1e-6), (1e-4, 0.5, 1e-8)])
def test_a_whole_curve_equals_its_points(q, sigma, delta):
    event = PoissonSampled(q, Gaussian(sigma))
    curve = epsilon_curve(event, 20_000, delta)
    assert curve.shape == (20_000,) and (np.diff(curve) >= 0).all()
    for steps in (1, 2, 9, 130, 2500, 20_000):
        exact = RDPAccountant().compose(event, steps).get_epsilon(delta)
        assert curve[steps - 1] == pytest.approx(exact, rel=1e-5)
    chosen = epsilon_curve(event, [0, 130, 2500], delta)
    np.testing.assert_allclose(chosen, [0.0, curve[129], curve[2499]], rtol=1e-5)


def test_curve_of_other_events():
    truncated = TruncatedPoisson(0.01, 1000, 60, Gaussian(1.5))
    assert epsilon_curve(truncated, [5, 10], 1e-5)[1] == RDPAccountant().compose(truncated, 10).get_epsilon(1e-5)
    np.testing.assert_array_equal(epsilon_curve(PoissonSampled(0.1, Gaussian(0.0)), [0, 3], 1e-5), [0.0, math.inf])
    assert epsilon_curve(Gaussian(1.0), [], 1e-5).size == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("delta", [0, 1, -1e-5, 1.5, math.nan])
def test_delta_outside_the_unit_interval_is_named(name, delta):
    with pytest.raises(ValueError, match="delta"):
        get_accountant(name).compose(Gaussian(1.0)).get_epsilon(delta)


def test_bad_arguments_are_named():
    accountant = RDPAccountant()
    with pytest.raises(TypeError, match="delta"):
        accountant.get_epsilon("small")
    with pytest.raises(ValueError, match="epsilon"):
        accountant.get_delta(-1.0)
    with pytest.raises(ValueError, match="group_size"):
        accountant.get_epsilon(1e-5, group_size=0)
    with pytest.raises(ValueError, match="count"):
        accountant.compose(Gaussian(1.0), -1)
    with pytest.raises(ValueError, match="sample_rate"):
        accountant.step(1.0, 2.0)
    with pytest.raises(TypeError, match="event"):
        accountant.compose("gaussian")
    with pytest.raises(ValueError, match="orders"):
        RDPAccountant([1.0, 2.0])
    with pytest.raises(ValueError, match="conversion"):
        ZCDPAccountant("loose")
    with pytest.raises(ValueError, match="tolerance"):
        PLDAccountant(0.0)
    with pytest.raises(ValueError, match="accountant"):
        get_accountant("prv")
    assert accountant.history == []


def test_delta_and_epsilon_are_inverse():
    for name in SAMPLING:
        for target in (1e-4, 1e-8):
            value = epsilon(name, delta=target)
            back = compute_delta(noise_multiplier=1.1, sample_rate=0.02, steps=200, epsilon=value, accountant=name)
            assert back == pytest.approx(target, rel=1e-2)
    assert get_accountant("pld").step(1.0, 0.1, 10).get_delta(math.inf) == 0.0


def test_an_instance_is_returned_as_it_is_and_not_changed_by_compute():
    mine = RDPAccountant(orders=[2.0, 8.0]).step(1.0, 0.1, 5)
    assert get_accountant(mine) is mine
    value = compute_epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=5, delta=1e-5, accountant=mine)
    assert value == mine.get_epsilon(1e-5) and len(mine) == 5
