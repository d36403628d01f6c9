"""Client-level aggregation: what a client can move, the noise, the account, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paddle_privacy import NoiseGenerator
from paddle_privacy.accounting import compute_epsilon, get_accountant
from paddle_privacy.federated import aggregate, draw_clients, round_event

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def client(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    random = np.random.RandomState(seed)
    return {"w": scale * random.randn(3, 2), "b": scale * random.randn(2)}


def flat(update: dict) -> np.ndarray:
    return np.concatenate([np.asarray(update["w"]).ravel(), np.asarray(update["b"]).ravel()])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6), st.floats(0.01, 100.0))
def test_the_sum_is_that_of_updates_clipped_one_by_one(scales, bound):
    sent = [client(i, scale) for i, scale in enumerate(scales)]
    expected = sum(flat(u) * min(1.0, bound / np.linalg.norm(flat(u))) for u in sent)
    found = aggregate(sent, bound, 0.0)
    np.testing.assert_allclose(flat(found), expected, rtol=1e-12, atol=1e-12 * bound)
    # One client more or less moves the sum by C at most, whatever it sends.
    less = aggregate(sent[:-1], bound, 0.0, like=sent[0])
    assert np.linalg.norm(flat(found) - flat(less)) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_client_that_sends_what_is_not_finite_is_left_out(bad):
    poisoned = client(1)
    poisoned["b"][0] = bad
    np.testing.assert_array_equal(
        flat(aggregate([client(0), poisoned], 1.0, 0.0)), flat(aggregate([client(0)], 1.0, 0.0))
    )


def test_the_noise_is_sigma_c_over_the_public_divisor_also_in_a_round_without_clients():
    like = paddle.zeros([300, 100], dtype="float64")
    for sent in ([], [like, like]):
        noise = aggregate(sent, 0.5, 3.0, expected_clients=10, like=like).numpy().ravel()
        low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], noise.size)
        assert low < (noise**2).sum() / 0.15**2 < high


def test_the_account_is_that_of_the_rounds():
    accountant = get_accountant("rdp")
    for _ in range(7):
        aggregate([], 1.0, 1.5, like=paddle.zeros([2]), accountant=accountant, sample_rate=0.2)
    expected = compute_epsilon(noise_multiplier=1.5, sample_rate=0.2, steps=7, delta=1e-5, accountant="rdp")
    assert accountant.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-9)
    assert accountant.history == [(round_event(1.5, 0.2), 7)]


def test_structure_and_dtypes_are_those_of_an_update():
    sent = [[paddle.ones([2]), paddle.ones([3], dtype="float64")]] * 2
    first, second = aggregate(iter(sent), 10.0, 0.0, expected_clients=4)
    assert (first.dtype, second.dtype) == (paddle.float32, paddle.float64)
    np.testing.assert_allclose(second.numpy(), 0.5)
    assert aggregate(np.ones([4, 3]), 10.0, 0.0).shape == [3]  # rows are clients


def test_seeded_noise_has_to_be_asked_for_and_repeats():
    like = paddle.zeros([5])
    with pytest.raises(ValueError, match="secure=False"):
        aggregate([], 1.0, 1.0, like=like, generator=NoiseGenerator.seeded(1))
    first, second = (
        aggregate([], 1.0, 1.0, like=like, generator=NoiseGenerator.seeded(1), secure=False).numpy() for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    assert (aggregate([], 1.0, 1.0, like=like).numpy() != aggregate([], 1.0, 1.0, like=like).numpy()).any()


@pytest.mark.parametrize(
    ("updates", "changed", "error", "names"),
    [
        ([], {}, ValueError, "like"),
        ([client(0)], {"clip_norm": 0.0}, ValueError, "clip_norm"),
        ([client(0)], {"clip_norm": float("inf")}, ValueError, "clip_norm"),
        ([client(0)], {"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ([client(0)], {"noise_multiplier": "1"}, TypeError, "noise_multiplier"),
        ([client(0)], {"expected_clients": 0}, ValueError, "expected_clients"),
        ([client(0)], {"expected_clients": float("inf")}, ValueError, "expected_clients"),
        ([client(0)], {"sample_rate": 1.5}, ValueError, "sample_rate"),
        ([client(0), {"w": np.ones([3, 2])}], {}, ValueError, r"updates\[1\] has other tensors"),
        ([client(0), {"w": np.ones([3, 3]), "b": np.ones(2)}], {}, ValueError, r"updates\[1\]\['w'\] has shape"),
        ([{"w": np.ones(2, dtype="int64")}], {}, TypeError, r"updates\[0\]\['w'\] must be of a floating-point"),
        ([{"w": [1.0]}], {}, TypeError, r"updates\[0\]\['w'\] must be a tensor"),
    ],
)
def test_what_is_refused_is_named_and_costs_nothing(updates, changed, error, names):
    accountant = get_accountant("rdp")
    given_arguments = {"clip_norm": 1.0, "noise_multiplier": 1.0, "accountant": accountant, **changed}
    with pytest.raises(error, match=names):
        aggregate(updates, **given_arguments)
    assert accountant.history == []


def test_clients_are_drawn_at_the_rate():
    counts = np.bincount(np.concatenate([draw_clients(50, 0.2) for _ in range(2000)]), minlength=50)
    assert np.abs(counts - 400).max() < 5.5 * np.sqrt(2000 * 0.2 * 0.8)
    assert draw_clients(3, 1.0) == [0, 1, 2]
    for wrong in ((0, 0.5), (10, 0.0), (10, 1.1)):
        with pytest.raises(ValueError):
            draw_clients(*wrong)


def test_the_simulation_of_a_thousand_clients_learns():
    import federated_simulation

    found = federated_simulation.main(["--rounds", "12"])
    expected = compute_epsilon(noise_multiplier=1.0, sample_rate=0.1, steps=12, delta=1e-4, accountant="rdp")
    assert found["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert found["accuracy"] > 0.6  # a guess is right a quarter of the time
