"""Each quantity from the others, never past the target, and within its tolerance of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_privacy.accounting import (
    FixedSize,
    Gaussian,
    ShuffledEpoch,
    calibrate_noise_multiplier,
    compute_epsilon,
    default_delta,
    get_accountant,
    get_noise_multiplier,
    get_sample_rate,
    get_steps,
    steps_for_epochs,
)
from paddle_privacy.errors import PrivacyWarning


@given(
    target=st.floats(0.02, 30),
    rate=st.floats(1e-4, 1.0),
    steps=st.integers(1, 5000),
    delta=st.sampled_from([1e-4, 1e-6, 1e-12]),
)
@settings(max_examples=20, deadline=None)
def test_rdp_noise_is_the_smallest_that_fits(target, rate, steps, delta):
    sigma = get_noise_multiplier(target_epsilon=target, target_delta=delta, sample_rate=rate, steps=steps)
    at = {"sample_rate": rate, "steps": steps, "delta": delta}
    assert compute_epsilon(noise_multiplier=sigma, **at) <= target
    assert compute_epsilon(noise_multiplier=sigma * (1 - 3e-5), **at) > target


@pytest.mark.parametrize("target", [0.05, 1.0, 12.0])
def test_pld_noise_is_the_smallest_that_fits_and_smaller_than_by_rdp(target):
    at = {"sample_rate": 0.02, "steps": 300}
    sigma = get_noise_multiplier(target_epsilon=target, target_delta=1e-6, accountant="pld", **at)
    assert compute_epsilon(noise_multiplier=sigma, delta=1e-6, accountant="pld", **at) <= target
    assert compute_epsilon(noise_multiplier=sigma * (1 - 1e-3), delta=1e-6, accountant="pld", **at) > target
    assert sigma < get_noise_multiplier(target_epsilon=target, target_delta=1e-6, **at)


@pytest.mark.parametrize("name", ["rdp", "pld", "zcdp"])
def test_noise_for_other_events(name):
    makers = [lambda s: ShuffledEpoch(Gaussian(s)), lambda s: Gaussian(s, "replace_one")]
    if name == "rdp":
        makers.append(lambda s: FixedSize(1000, 20, Gaussian(s, "replace_one")))
    for make in makers:
        sigma = calibrate_noise_multiplier(
            make, target_epsilon=2.0, target_delta=1e-5, count=4, accountant=name, rtol=1e-4
        )
        spent = get_accountant(name).compose(make(sigma), 4).get_epsilon(1e-5)
        assert 1.99 < spent <= 2.0


@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_steps_and_rate_are_the_largest_that_fit(name):
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "noise_multiplier": 1.1, "accountant": name}
    steps = get_steps(sample_rate=0.02, **target)
    at = {"noise_multiplier": 1.1, "delta": 1e-5, "accountant": name}
    assert compute_epsilon(steps=steps, sample_rate=0.02, **at) <= 2.0
    assert compute_epsilon(steps=steps + 1, sample_rate=0.02, **at) > 2.0
    rate = get_sample_rate(steps=steps, **target)
    assert compute_epsilon(steps=steps, sample_rate=rate, **at) <= 2.0
    assert compute_epsilon(steps=steps, sample_rate=rate * 1.001, **at) > 2.0


def test_ends_of_the_range():
    at = {"target_epsilon": 1.0, "target_delta": 1e-5}
    assert get_steps(noise_multiplier=0.3, sample_rate=1.0, **at) == 0
    assert get_sample_rate(noise_multiplier=50.0, steps=1, **at) == 1.0
    assert get_sample_rate(noise_multiplier=0.0, steps=1, **at) == 0.0
    assert get_noise_multiplier(sample_rate=0.1, steps=0, **at) <= 1e-6
    with pytest.raises(ValueError, match="unlimited"):
        get_steps(noise_multiplier=1.0, sample_rate=0.0, **at)


def test_steps_for_epochs_rounds_up_and_not_by_accident():
    assert steps_for_epochs(10, 256 / 9600) == 375
    assert steps_for_epochs(1, 1 / 3) == 3
    assert steps_for_epochs(3, 1 / 49) == 147
    assert steps_for_epochs(1, 256 / 1000) == 4
    assert steps_for_epochs(0.5, 0.2) == 3
    at = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1}
    assert get_noise_multiplier(epochs=3, **at) == get_noise_multiplier(steps=30, **at)


def test_a_rule_of_thumb_delta_warns():
    with pytest.warns(PrivacyWarning, match="delta was not given"):
        assert default_delta(10_000) == pytest.approx(10_000**-1.1)
    with pytest.raises(ValueError, match="dataset_size"):
        default_delta(1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"target_epsilon": 0}, "target_epsilon"),
        ({"target_epsilon": -1}, "target_epsilon"),
        ({"target_delta": 0}, "target_delta"),
        ({"target_delta": 1.0}, "target_delta"),
        ({"sample_rate": 0}, "sample_rate"),
        ({"sample_rate": 1.2}, "sample_rate"),
        ({"steps": None}, "steps and epochs"),
        ({"epochs": 3}, "steps and epochs"),
        ({"steps": -1}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"accountant": "gdp"}, "accountant"),
    ],
)
def test_bad_targets_are_named(change, message):
    arguments = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 10, **change}
    with pytest.raises(ValueError, match=message):
        get_noise_multiplier(**arguments)


def test_a_target_of_the_wrong_type_is_a_type_error():
    with pytest.raises(TypeError, match="target_epsilon"):
        get_noise_multiplier(target_epsilon="3", target_delta=1e-5, sample_rate=0.1, steps=10)
