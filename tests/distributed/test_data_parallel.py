"""W processes make the update that one process would make, with the noise that ε is about, and fail together."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paddle_privacy.accounting import compute_epsilon
from paddle_privacy.verify.chain import read_ledger

WORLDS = (1, 2, 3, 4)
MANY = WORLDS[1:]
CASES = ("plain", "wrapped before", "wrapped after", "recompute", "pieces, adamw")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", MANY)
def test_without_noise_the_ranks_train_as_one_process(ranks, world, case):
    alone = ranks[1][0]["equality"][case]
    together = [rank["equality"][case] for rank in ranks[world]]
    # float32: the sums are added in another order; AdamW divides by roots of small numbers.
    tolerance = 2e-4 if "adamw" in case else 2e-6
    np.testing.assert_allclose(together[0]["values"], alone["values"], rtol=0, atol=tolerance)
    assert len({rank["digest"] for rank in together}) == 1
    assert {rank["epsilon"] for rank in together} == {alone["epsilon"]}


def test_the_training_that_is_compared_moves_the_weights(ranks):
    plain, adamw = (np.array(ranks[1][0]["equality"][case]["values"]) for case in ("plain", "pieces, adamw"))
    assert np.abs(plain - adamw).max() > 0.01


@pytest.mark.parametrize("world", MANY)
def test_virtual_batches_of_all_rows_train_as_one_process(ranks, world):
    alone, together = ranks[1][0]["virtual"], [rank["virtual"] for rank in ranks[world]]
    np.testing.assert_allclose(together[0]["values"], alone["values"], rtol=0, atol=2e-4)
    assert len({rank["digest"] for rank in together}) == 1
    assert {rank["steps"] for rank in together} == {alone["steps"]} == {3}
    # 24 rows in pieces of at most 5, and a rank's share of them.
    assert alone["pieces"] == 3 * 5 and {rank["pieces"] for rank in together} == {3 * -(-24 // world // 5)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", MANY)
def test_scaled_losses_and_low_precision_train_as_on_one_process(ranks, world, dtype):
    alone, together = ranks[1][0]["low"][dtype], [rank["low"][dtype] for rank in ranks[world]]
    # A row's gradient is rounded the same wherever it is computed; only the order of the sum is another.
    np.testing.assert_allclose(together[0]["values"], alone["values"], rtol=0, atol=2e-6)
    assert len({rank["digest"] for rank in together}) == 1
    assert {rank["scale"] for rank in together} == {1024.0}


def test_low_precision_is_another_computation(ranks):
    exact, rounded = (np.array(ranks[1][0]["low"][dtype]["values"]) for dtype in ("float32", "bfloat16"))
    assert np.abs(exact - rounded).max() > 3e-5


@pytest.mark.parametrize("world", MANY)
def test_adaptive_clipping_follows_the_norms_of_all_ranks(ranks, world):
    together = [rank["adaptive"] for rank in ranks[world]]
    np.testing.assert_allclose(together[0]["bounds"], ranks[1][0]["adaptive"]["bounds"], rtol=1e-5)
    assert all(rank == together[0] for rank in together)


@pytest.mark.parametrize("source", ["os", "one seed on all ranks"])
@pytest.mark.parametrize("world", WORLDS)
def test_the_noise_has_the_accounted_variance_whatever_the_number_of_ranks(ranks, world, source):
    found = [rank["noise"][source] for rank in ranks[world]]
    # Two-sided, 1e-6: a false alarm once in a million runs. One share too many or too few is 25% or more of variance.
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], found[0]["count"])
    assert low < found[0]["chi2"] < high
    # The mean shows shares that are not independent of each other.
    assert abs(found[0]["mean"]) < 5 * 3.0 * 0.5 / 4 / found[0]["count"] ** 0.5
    assert len({rank["digest"] for rank in found}) == 1
    assert {rank["epsilon"] for rank in found} == {ranks[1][0]["noise"][source]["epsilon"]}
    assert {rank["world"] for rank in found} == {world}


@pytest.mark.parametrize("world", MANY)
def test_poisson_shares_and_virtual_batches_keep_one_account_and_one_ledger(ranks, folder, world):
    found = [rank["sampled"] for rank in ranks[world]]
    expected = compute_epsilon(noise_multiplier=1.0, sample_rate=6 / 24, steps=12, delta=1e-5, accountant="rdp")
    assert {rank["updates"] for rank in found} == {12}
    assert len({rank["digest"] for rank in found}) == 1
    for rank in found:
        assert rank["epsilon"] == pytest.approx(expected, rel=1e-9)
    ledger = read_ledger(folder / str(world) / "ledger.jsonl")
    assert [run.header["world_size"] for run in ledger.runs] == [world]
    assert sum(count for _, count in ledger.spent) == 12


@pytest.mark.parametrize("world", MANY)
@pytest.mark.parametrize("name", ["engine", "engine, dealt out"])
def test_the_engine_calibrates_for_the_whole_and_stops_all_ranks_at_the_budget(ranks, world, name):
    found = [rank["sampled"][name] for rank in ranks[world]]
    batch = 6 if name == "engine" else 2 * world
    assert all(rank == found[0] for rank in found)
    assert found[0]["batch_size"] == batch and found[0]["rate"] == pytest.approx(batch / 24)
    assert found[0]["stopped"] == 2 * -(-24 // batch)
    assert 2.9 < found[0]["epsilon"] <= 3.0


@pytest.mark.parametrize("world", MANY)
def test_rows_dealt_out_by_paddle_are_charged_once_a_pass(ranks, world):
    found = [rank["sampled"]["shuffled"] for rank in ranks[world]]
    assert all(rank == found[0] for rank in found)
    ((event, passes),) = found[0]["history"]
    assert event["event"] == "ShuffledEpoch" and passes == 2


@pytest.mark.parametrize("world", MANY)
def test_a_failure_on_one_rank_is_raised_on_all_and_changes_nothing(ranks, world):
    found = [rank["refusals"] for rank in ranks[world]]
    culprit = found[-1].pop("capture")
    assert culprit.startswith("PrivacyError: parameters ['first.weight']")
    for rank in found[:-1]:
        assert rank["capture"] == f"PrivacyError: no rank made this step, because of rank {world - 1}: {culprit}"
    for rank in found:
        assert rank["capture, untouched"] and rank["and goes on"] == ""


@pytest.mark.parametrize("world", MANY)
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("learning rate", "disagree in ['learning rate']"),
        ("divergence", "are no longer those of rank 0"),
        ("models", "the models disagree in ['bias', 'weight']"),
        ("loader of one process", "shares its rows among 1 rank(s)"),
        ("sampler of one process", "shares its rows among 1 rank(s)"),
    ],
)
def test_disagreement_and_unsound_loaders_are_refused_on_all_ranks(ranks, world, what, says):
    for rank in ranks[world]:
        assert says in rank["refusals"][what]


@pytest.mark.parametrize("world", MANY)
def test_what_is_taken_over_or_assumed_is_said(ranks, world):
    said = [rank["refusals"]["said"] for rank in ranks[world]]
    assert len(said[0]) == 1 and "was switched off" in said[0][0]
    assert said[1:] == [[]] * (world - 1)
    assert all(len(rank["refusals"]["said, rows"]) == 1 for rank in ranks[world])
