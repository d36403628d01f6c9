"""The shares that ranks draw make up one Poisson batch over all rows."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paddle_privacy import PoissonBatchSampler
from paddle_privacy.sampling import detect_sampling


def draws(world: int, rows: int, rate: float, steps: int) -> np.ndarray:
    """[steps, rows] of 0 and 1: who is in the union of all ranks' batches."""
    joined = np.zeros([steps, rows], dtype=np.int64)
    for rank in range(world):
        sampler = PoissonBatchSampler(num_rows=rows, sample_rate=rate, steps=steps, num_replicas=world, rank=rank)
        for step, batch in enumerate(sampler):
            emission = sampler.emissions.take(len(batch))
            if not emission.placeholder:
                assert all(row % world == rank for row in batch)
                joined[step, batch] += 1
    return joined


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_every_row_is_in_the_union_at_the_rate_and_independently_of_every_other(world, rate):
    steps, rows = 4000, 10
    joined = draws(world, rows, rate, steps)
    assert joined.max() == 1
    # Inclusion of each row, of each pair (of one rank and of two), and steps that follow each other; z-scores with a
    # Bonferroni bound: one false alarm in 10^5 tests.
    tests: list[tuple[float, float, int]] = [(joined[:, i].mean(), rate, steps) for i in range(rows)]
    for i in range(rows):
        for j in range(i):
            tests.append(((joined[:, i] * joined[:, j]).mean(), rate**2, steps))
        tests.append(((joined[1:, i] * joined[:-1, i]).mean(), rate**2, (steps - 1) // 2))
    bound = stats.norm.isf(1e-5 / 2 / len(tests))
    for found, p, n in tests:
        assert abs(found - p) < bound * np.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_size_of_the_union_is_binomial(world):
    steps, rows, rate = 3000, 10, 0.3
    sizes = np.bincount(draws(world, rows, rate, steps).sum(axis=1), minlength=rows + 1)
    expected = steps * stats.binom.pmf(np.arange(rows + 1), rows, rate)
    tail = expected >= 5
    observed = np.append(sizes[tail], sizes[~tail].sum())
    wanted = np.append(expected[tail], expected[~tail].sum())
    assert stats.chisquare(observed, wanted).pvalue > 1e-6


def test_more_ranks_than_rows_leave_empty_shares_that_take_part():
    samplers = [PoissonBatchSampler(num_rows=2, sample_rate=1.0, steps=3, num_replicas=4, rank=r) for r in range(4)]
    assert [list(s) for s in samplers] == [[[0]] * 3, [[1]] * 3, [[0]] * 3, [[0]] * 3]
    for s in samplers[2:]:
        assert s.emissions.take(1).placeholder
    assert {len(s) for s in samplers} == {3}


def test_a_seed_that_is_equal_on_all_ranks_gives_different_draws():
    with pytest.warns(match="for tests"):
        samplers = [
            PoissonBatchSampler(num_rows=4000, sample_rate=0.5, steps=1, num_replicas=2, rank=r, seed=1)
            for r in range(2)
        ]
    first, second = (np.array(next(iter(s))) // 2 for s in samplers)
    # Two independent halves of 2000 rows share 500; equal draws would share 1000.
    assert abs(len(np.intersect1d(first, second)) - 500) < 6 * np.sqrt(2000 * 0.25 * 0.75)


def test_n_rate_and_batch_size_are_those_of_all_ranks():
    sampler = PoissonBatchSampler(num_rows=103, batch_size=10, num_replicas=4, rank=3)
    scheme = detect_sampling(sampler)
    assert (scheme.num_rows, scheme.batch_size, scheme.steps_per_epoch, scheme.ranks) == (103, 10, 11, 4)
    assert "shared among 4 ranks" in scheme.reason


@pytest.mark.parametrize(("replicas", "rank"), [(2, None), (None, 0), (2, 2), (0, 0), (2, -1)])
def test_impossible_ranks_are_refused(replicas, rank):
    with pytest.raises(ValueError):
        PoissonBatchSampler(num_rows=10, batch_size=2, num_replicas=replicas, rank=rank)


def test_a_billion_rows_on_many_ranks_cost_what_the_batch_costs():
    sampler = PoissonBatchSampler(num_rows=10**9, batch_size=4096, steps=1, num_replicas=64, rank=63)
    (batch,) = list(sampler)
    assert 8 < len(batch) < 160  # 64 expected; 8 and 160 are more than 7 standard deviations away
    assert all(0 <= row < 10**9 and row % 64 == 63 for row in batch)
