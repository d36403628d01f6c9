"""Events are values; what they amount to, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_privacy.accounting import (
    Composed,
    Event,
    FixedSize,
    Gaussian,
    PLDAccountant,
    PoissonSampled,
    RDPAccountant,
    SelfComposed,
    ShuffledEpoch,
    TruncatedPoisson,
    ZCDPAccountant,
    get_accountant,
)
from paddle_privacy.accounting.events import combined_noise_multiplier
from paddle_privacy.errors import UnsupportedEvent

sigmas = st.floats(0.1, 50)
rates = st.floats(0, 1)
gaussians = st.builds(Gaussian, sigmas)
sums = st.one_of(gaussians, st.builds(lambda a, b: Composed((a, b)), gaussians, gaussians))
sampled = st.one_of(
    st.builds(PoissonSampled, rates, sums),
    st.builds(ShuffledEpoch, sums),
    st.builds(lambda n, b, e: FixedSize(n + b, b, e), st.integers(1, 500), st.integers(1, 50), sums),
    st.builds(TruncatedPoisson, rates, st.integers(1, 500), st.integers(1, 500), sums),
    sums,
)
events = st.one_of(
    sampled,
    st.builds(SelfComposed, sampled, st.integers(0, 9)),
    st.builds(lambda parts: Composed(tuple(parts)), st.lists(sampled, min_size=1, max_size=3)),
)


@given(events)
@settings(max_examples=200, deadline=None)
def test_an_event_survives_json(event):
    restored = Event.from_dict(json.loads(json.dumps(event.to_dict())))
    assert restored == event and hash(restored) == hash(event)
    assert event.to_dict()["event"] == type(event).__name__
    assert event.relation in ("add_or_remove_one", "zero_out")
    replaced = event.under("replace_one")
    assert replaced.relation == "replace_one"
    assert RDPAccountant.supports(event) and PLDAccountant.supports(event)


def test_two_sums_over_one_batch_are_one_gaussian():
    # Adaptive clipping: gradients with σ = 1.1 and a count of sensitivity 1/2 with noise 10, in one Poisson batch.
    both = Composed((Gaussian(1.1), Gaussian(2 * 10.0)))
    combined = combined_noise_multiplier(both)
    assert combined == pytest.approx((1.1**-2 + 20.0**-2) ** -0.5, rel=1e-14)
    assert combined_noise_multiplier(SelfComposed(Gaussian(3.0), 9)) == pytest.approx(1.0)
    assert combined_noise_multiplier(PoissonSampled(0.1, Gaussian(1.0))) is None
    for name in ("rdp", "pld"):
        together = get_accountant(name).compose(PoissonSampled(0.01, both), 500).get_epsilon(1e-5)
        as_one = get_accountant(name).step(combined, 0.01, 500).get_epsilon(1e-5)
        assert together == pytest.approx(as_one, rel=1e-9)
        # Two separate batches are something else: their amplification is separate too.
        apart = (
            get_accountant(name)
            .compose(Composed((PoissonSampled(0.01, Gaussian(1.1)), PoissonSampled(0.01, Gaussian(20.0)))), 500)
            .get_epsilon(1e-5)
        )
        assert apart != pytest.approx(together, rel=1e-6)


def test_relations_of_events():
    assert Gaussian(1.0).relation == "add_or_remove_one"
    assert ShuffledEpoch(Gaussian(1.0)).relation == "zero_out"
    assert FixedSize(10, 2, Gaussian(1.0)).relation == "zero_out"
    assert FixedSize(10, 2, Gaussian(1.0, "replace_one")).relation == "replace_one"
    assert PoissonSampled(0.1, Gaussian(1.0, "zero_out")).relation == "zero_out"
    assert Composed((Gaussian(1.0), ShuffledEpoch(Gaussian(1.0)))).relation == "zero_out"
    with pytest.raises(UnsupportedEvent, match="replace_one"):
        Composed((Gaussian(1.0), Gaussian(1.0, "replace_one")))
    with pytest.raises(UnsupportedEvent, match="ShuffledEpoch"):
        ShuffledEpoch(Gaussian(1.0)).under("add_or_remove_one")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Gaussian(-1.0), "noise_multiplier"),
        (lambda: Gaussian(math.inf), "noise_multiplier"),
        (lambda: Gaussian(math.nan), "noise_multiplier"),
        (lambda: Gaussian(1.0, "swap"), "relation"),
        (lambda: PoissonSampled(1.5, Gaussian(1.0)), "sample_rate"),
        (lambda: PoissonSampled(-0.1, Gaussian(1.0)), "sample_rate"),
        (lambda: FixedSize(10, 11, Gaussian(1.0)), "batch_size"),
        (lambda: FixedSize(0, 0, Gaussian(1.0)), "dataset_size"),
        (lambda: TruncatedPoisson(0.1, 10, 0, Gaussian(1.0)), "max_batch_size"),
        (lambda: SelfComposed(Gaussian(1.0), -1), "count"),
        (lambda: Composed(()), "events"),
        (lambda: Event.from_dict({"event": "Laplace"}), "Laplace"),
        (lambda: Event.from_dict({"event": "Gaussian"}), "Gaussian"),
        (lambda: Event.from_dict({"event": "Gaussian", "noise_multiplier": 1.0, "sigma": 2}), "sigma"),
    ],
)
def test_impossible_events_are_value_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: Gaussian("1"), lambda: PoissonSampled(0.1, 3.0), lambda: Gaussian(True)])
def test_wrong_types_are_type_errors(make):
    with pytest.raises(TypeError):
        make()


def test_numpy_numbers_are_numbers():
    import numpy as np

    assert (
        Gaussian(np.float32(1.0)) == Gaussian(1.0) and PoissonSampled(np.float64(0.5), Gaussian(1)).sample_rate == 0.5
    )
    json.dumps(Gaussian(np.float64(2.0)).to_dict())


@pytest.mark.parametrize(
    "accountant, event, named",
    [
        (ZCDPAccountant(), PoissonSampled(0.1, Gaussian(1.0)), "'rdp'"),
        (ZCDPAccountant(), FixedSize(10, 2, Gaussian(1.0)), "'pld'"),
        (RDPAccountant(), PoissonSampled(0.1, PoissonSampled(0.1, Gaussian(1.0))), "PoissonSampled"),
        (PLDAccountant(), ShuffledEpoch(PoissonSampled(0.1, Gaussian(1.0))), "ShuffledEpoch"),
        (RDPAccountant(), Gaussian(1.0, "replace_one"), "replace_one"),
    ],
)
def test_a_refused_event_changes_nothing(accountant, event, named):
    accountant.compose(Gaussian(5.0), 3)
    before = (accountant.state_dict(), accountant.get_epsilon(1e-5), accountant.relation)
    with pytest.raises(UnsupportedEvent, match=named):
        accountant.compose(event)
    assert (accountant.state_dict(), accountant.get_epsilon(1e-5), accountant.relation) == before


def test_a_partly_unsupported_composition_is_refused_whole():
    accountant = ZCDPAccountant()
    event = Composed((Gaussian(1.0), PoissonSampled(0.1, Gaussian(1.0))))
    assert not ZCDPAccountant.supports(event) and RDPAccountant.supports(event)
    with pytest.raises(UnsupportedEvent):
        accountant.compose(event)
    assert accountant.get_rho() == 0 and accountant.history == []


def test_group_privacy_without_a_known_bound_is_refused():
    accountant = PLDAccountant().compose(FixedSize(100, 5, Gaussian(1.0)), 3)
    assert accountant.get_epsilon(1e-5) > 0
    with pytest.raises(UnsupportedEvent, match="group_size"):
        accountant.get_epsilon(1e-5, group_size=2)
