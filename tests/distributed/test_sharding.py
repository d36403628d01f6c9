"""Sharded optimizer states: the update, the noise and the checkpoint of one process, with each moment on one rank."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paddle_privacy.distributed.sharding import balanced_owners, chosen_stage

WORLDS = (1, 2, 3, 4)
MANY = WORLDS[1:]
CASES = ("adamw", "momentum, groups", "lamb, thawed")
RUNS = [*((2, case) for case in CASES), (3, "lamb, thawed"), (4, "momentum, groups")]


@pytest.mark.parametrize(("world", "case"), RUNS)
def test_without_noise_sharded_ranks_train_as_one_process(ranks, world, case):
    alone = ranks[1][0]["sharded"]["equality"][case]
    together = [rank["sharded"]["equality"][case] for rank in ranks[world]]
    # float32: the sums are added in another order; Adam and Lamb divide by roots of small numbers.
    tolerance = 2e-6 if "momentum" in case else 2e-4
    np.testing.assert_allclose(together[0]["values"], alone["values"], rtol=0, atol=tolerance)
    assert len({rank["digest"] for rank in together}) == 1


def test_the_updates_that_are_compared_differ(ranks):
    found = ranks[1][0]["sharded"]["equality"]
    adamw, momentum, lamb = (np.array(found[case]["values"]) for case in CASES)
    assert min(np.abs(adamw - momentum).max(), np.abs(adamw - lamb).max(), np.abs(momentum - lamb).max()) > 0.01


@pytest.mark.parametrize(("world", "case"), RUNS)
def test_every_moment_is_on_its_owner_only_and_memory_falls(ranks, world, case):
    alone = ranks[1][0]["sharded"]["equality"][case]["bytes"]
    held = [rank["sharded"]["equality"][case]["bytes"] for rank in ranks[world]]
    joined = [place for rank in held for place in rank]
    assert sorted(joined) == sorted(alone)  # each parameter's once
    assert {place: size for rank in held for place, size in rank.items()} == alone
    most = max(sum(rank.values()) for rank in held)
    # No more than a fair share and the largest parameter, of which an owner holds all.
    assert most <= sum(alone.values()) / world + max(alone.values())
    assert most < 0.75 * sum(alone.values())


def test_without_sharding_every_rank_holds_all_moments(ranks):
    for rank in ranks[2]:
        assert rank["sharded"]["equality"]["whole"]["bytes"] == ranks[1][0]["sharded"]["equality"]["adamw"]["bytes"]


@pytest.mark.parametrize(("world", "kind"), [*((w, "sharded") for w in WORLDS), (1, "whole"), (2, "whole")])
def test_the_noise_has_the_accounted_variance_whoever_owns_a_parameter(ranks, world, kind):
    found = [rank["sharded"]["noise"][kind] for rank in ranks[world]]
    # Two-sided, 1e-6: a false alarm once in a million runs.
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], found[0]["count"])
    assert low < found[0]["chi2"] < high
    assert abs(found[0]["mean"]) < 5 * 3.0 * 0.5 / 4 / found[0]["count"] ** 0.5
    assert len({rank["digest"] for rank in found}) == 1
    # What a correction of Adam's second moment subtracts is the noise of all ranks together.
    assert {rank["noise moment"] for rank in found} == {ranks[1][0]["sharded"]["noise"]["whole"]["noise moment"]}


@pytest.mark.parametrize(("world", "kind"), [*((w, "sharded") for w in MANY), (2, "whole")])
def test_no_sum_leaves_a_rank_without_its_share_of_the_noise(ranks, world, kind):
    for rank in ranks[world]:
        found = rank["sharded"]["noise"][kind]
        assert found["sent"] == found["count"]
        # σ²C²/W in every coordinate that is sent; 1e-6, as above.
        low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], found["sent"])
        assert low < found["sent chi2"] < high
        assert found["values only"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_checkpoint_of_two_sharded_ranks_resumes_on_any_number(ranks, world):
    saved = ranks[2][0]["sharded"]["resumed"]
    found = [rank["sharded"]["resumed"] for rank in ranks[world]]
    np.testing.assert_allclose(found[0]["values"], saved["values"], rtol=0, atol=2e-4)
    assert len({rank["digest"] for rank in found}) == 1
    for rank in found:
        assert (rank["steps"], rank["rate"]) == (2, pytest.approx(0.009))
        assert rank["entries"] == 9 * 4  # all of Adam's, on every rank
    assert sum(sum(rank["bytes"].values()) for rank in found) == sum(
        ranks[1][0]["sharded"]["resumed"]["bytes"].values()
    )


def test_resuming_without_the_moments_would_show(ranks):
    """AdamW's first two steps are not its third and fourth: the values that are compared depend on the moments."""
    resumed = ranks[1][0]["sharded"]["resumed"]["values"]
    assert np.abs(np.array(resumed) - ranks[1][0]["sharded"]["equality"]["adamw"]["values"]).max() > 1e-3


@pytest.mark.parametrize("world", [2, 3])
def test_master_weights_are_sharded_and_saved_whole(ranks, world):
    alone = ranks[1][0]["sharded"]["master"]
    found = [rank["sharded"]["master"] for rank in ranks[world]]
    assert sum(rank["held"] for rank in found) == sum(rank["still held"] for rank in found) == alone["held"] == 2
    for rank in found:
        for name in ("masters", "rounded"):
            for mine, wanted in zip(rank[name], alone[name]):
                np.testing.assert_allclose(mine, wanted, rtol=1e-2 if name == "rounded" else 0, atol=1e-6)


@pytest.mark.parametrize("world", MANY)
def test_ranks_that_disagree_about_sharding_raise_on_all(ranks, world):
    for number, rank in enumerate(ranks[world]):
        found = rank["sharded"]["refused"]
        assert "the optimizers disagree in ['owners', 'sharding_stage']" in found["stages"]
        assert "all ranks must call state_dict() or save_checkpoint() at the same point" in found["alone"]
        assert found["alone"].startswith("PrivacyError: " + ("no rank made this step" if number else "the optimizer's"))
        assert found["and goes on"] == "" and found["moved"] == "True"


def test_fleet_with_a_sharding_degree_trains_privately_as_it_is(ranks):
    found = [rank["sharded"]["fleet"] for rank in ranks[2]]
    np.testing.assert_allclose(
        found[0]["values"], ranks[1][0]["sharded"]["equality"]["adamw"]["values"], rtol=0, atol=2e-4
    )
    assert len({rank["digest"] for rank in found}) == 1
    for rank, sharded in zip(found, (rank["sharded"]["equality"]["adamw"] for rank in ranks[2])):
        assert rank["wrappers"] == ["ShardingParallel", "HybridParallelOptimizer"]
        assert rank["bytes"] == sharded["bytes"] and rank["steps"] == 4


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_owners_are_balanced_and_frozen_parameters_do_not_count(world):
    generator = np.random.RandomState(world)
    sizes = generator.randint(1, 10**6, 40).tolist()
    trained = [i % 3 > 0 for i in range(40)]
    owners = balanced_owners(sizes, trained, world)
    assert owners == balanced_owners(list(sizes), list(trained), world)
    load = [sum(s for s, o, t in zip(sizes, owners, trained) if o == r and t) for r in range(world)]
    assert sum(load) == sum(s for s, t in zip(sizes, trained) if t)
    assert max(load) - min(load) <= max(sizes)
    assert balanced_owners([5, 5], [True, True], 7) == [0, 1]


@pytest.mark.parametrize(("asked", "degree", "stage"), [(None, 1, 0), (None, 4, 2), (0, 4, 0), (1, 1, 1), (2, 4, 2)])
def test_the_stage_is_what_is_asked_for_or_what_fleet_was_told(asked, degree, stage):
    assert chosen_stage(asked, degree) == stage


@pytest.mark.parametrize(
    ("asked", "says"), [(3, "whole gradient norm"), (4, "0 .none., 1 or 2"), (True, "True"), ("1", "'1'")]
)
def test_other_stages_are_refused(asked, says):
    with pytest.raises(ValueError, match=f"sharding_stage.*{says}"):
        chosen_stage(asked, 1)
