"""The sampler against independent Bernoulli trials. Each statistical test fails by chance once in 10^6 runs."""

from __future__ import annotations

import math
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paddle_privacy.errors import PrivacyWarning
from paddle_privacy.sampling import PoissonBatchSampler
from paddle_privacy.sampling.poisson import poisson_rows

ALARM = 1e-6


def draws(num_rows: int, steps: int, **rate) -> np.ndarray:
    """Inclusion matrix [steps, N] of one iteration, placeholders taken out."""
    sampler = PoissonBatchSampler(num_rows=num_rows, steps=steps, **rate)
    included = np.zeros((steps, num_rows), dtype=np.int64)
    for step, rows in enumerate(sampler):
        emission = sampler.emissions.take(len(rows))
        if emission.placeholder:
            assert rows == [0]
        else:
            assert len(set(rows)) == len(rows)
            included[step, rows] = 1
    return included


@pytest.mark.parametrize(("num_rows", "rate"), [(40, 0.05), (40, 0.5), (40, 0.93), (500, 0.01)])
def test_each_row_is_included_at_the_rate(num_rows, rate):
    steps = 20_000
    counts = draws(num_rows, steps, sample_rate=rate).sum(0)
    chi2 = ((counts - steps * rate) ** 2 / (steps * rate * (1 - rate))).sum()
    assert ALARM / 2 < stats.chi2.sf(chi2, num_rows) < 1 - ALARM / 2


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_pairs_are_included_at_the_square_of_the_rate(rate):
    steps, num_rows = 20_000, 30
    x = draws(num_rows, steps, sample_rate=rate) - rate
    covariance = (x.T @ x / steps)[np.triu_indices(num_rows, 1)]
    z = covariance * math.sqrt(steps) / (rate * (1 - rate))
    assert abs(z).max() < stats.norm.isf(ALARM / (2 * len(z)))
    # Neighbours are where a gap sampler would go wrong first.
    near = np.diagonal(x.T @ x / steps, 1).sum() * math.sqrt(steps / (num_rows - 1)) / (rate * (1 - rate))
    assert abs(near) < stats.norm.isf(ALARM / 2)


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (7, 3), (99, 10), (100, 7), (105, 64), (12_345, 50)])
def test_batch_sizes_are_binomial(num_rows, size):
    rate, steps = size / num_rows, 3_000
    if num_rows < 1_000:
        sizes = draws(num_rows, steps, batch_size=size).sum(1)
    else:
        words = lambda k: np.frombuffer(os.urandom(8 * k), dtype=np.uint64)  # noqa: E731
        sizes = np.array([len(poisson_rows(num_rows, rate, words)) for _ in range(steps)])
    # Classes of at least five expected counts, so that the chi-square law holds.
    cumulative = stats.binom(num_rows, rate).cdf(np.arange(num_rows + 1))
    edges, cdf = [], [0.0]
    for k, below in enumerate(cumulative):
        if (below - cdf[-1]) * steps >= 5 and (1 - below) * steps >= 5:
            edges.append(k)
            cdf.append(below)
    cdf.append(1.0)
    seen = np.histogram(sizes, [-0.5, *(k + 0.5 for k in edges), num_rows + 0.5])[0]
    expected = np.diff(cdf) * steps
    if len(seen) == 1:
        assert seen[0] == steps
        return
    assert stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), len(seen) - 1) > ALARM


def test_steps_are_independent():
    rate, steps, num_rows = 0.3, 20_000, 30
    x = draws(num_rows, steps, sample_rate=rate) - rate
    z = (x[1:].T @ x[:-1] / (steps - 1)).ravel() * math.sqrt(steps - 1) / (rate * (1 - rate))
    assert abs(z).max() < stats.norm.isf(ALARM / (2 * len(z)))


def test_gaps_at_a_tiny_rate_follow_the_geometric_law():
    num_rows, rate = 10**12, 1e-9
    words = lambda k: np.frombuffer(os.urandom(8 * k), dtype=np.uint64)  # noqa: E731
    rows = np.concatenate([poisson_rows(num_rows, rate, words) + i * num_rows for i in range(10)])
    assert stats.kstest(np.diff(rows) * rate, "expon").pvalue > ALARM
    assert abs(len(rows) - 10_000) < 100 * stats.norm.isf(ALARM / 2)


def test_rounding_never_raises_the_rate():
    """The largest word that still includes the first row bounds P(row 0 joins) from above; exact, no sampling."""
    from paddle_privacy.sampling.poisson import _STRETCH, _exponentials

    for rate in (1e-8, 1e-5, 0.01, 0.3, 0.5, 0.75):
        scale = -math.log1p(-rate) * (1 - _STRETCH)

        def joins(x: int, scale: float = scale) -> bool:
            # x orders the uniforms: 0 .. 2^64-1 from the short gaps to the long ones.
            word = x if x < 2**63 else 2**63 + (2**64 - 1 - x)
            return bool(math.floor(_exponentials(np.array([word], dtype=np.uint64))[0] / scale) == 0)

        low, high = 0, 2**64 - 1
        assert joins(low) and not joins(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if joins(middle) else (low, middle)
        realised = high / 2**64
        assert rate * (1 - 1e-9) < realised <= rate


def test_a_hundred_million_rows_cost_no_more_than_the_batch():
    sampler = PoissonBatchSampler(num_rows=10**8, batch_size=1000, steps=10)
    tracemalloc.start()
    sizes = [len(rows) for rows in sampler]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert abs(sum(sizes) - 10_000) < 100 * stats.norm.isf(ALARM / 2)


def test_iterations_runs_and_forks_draw_afresh():
    sampler = PoissonBatchSampler(num_rows=1000, batch_size=100, steps=5)
    with pytest.warns(PrivacyWarning, match="knows who was in which batch"):
        seeded = PoissonBatchSampler(num_rows=1000, batch_size=100, steps=5, seed=7)
    with pytest.warns(PrivacyWarning):
        again = PoissonBatchSampler(num_rows=1000, batch_size=100, steps=5, seed=7)
    seen = [list(sampler), list(sampler), list(seeded), list(seeded)]
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
    assert seen[2:] == [list(again), list(again)]

    reader, writer = os.pipe()
    iterator = iter(sampler)
    child = os.fork()
    if child == 0:
        os.write(writer, repr(next(iterator)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 2**16).decode() != repr(next(iterator))


@pytest.mark.parametrize("num_rows", [1, 7, 99, 100, 105, 12_345])
@pytest.mark.parametrize("size", [1, 7, 10, 64, 99])
def test_rate_and_steps_are_exact_at_any_size(num_rows, size):
    if size > num_rows:
        with pytest.raises(ValueError, match="batch_size"):
            PoissonBatchSampler(num_rows=num_rows, batch_size=size)
        return
    sampler = PoissonBatchSampler(range(num_rows), batch_size=size)
    assert sampler.sample_rate == size / num_rows
    assert len(sampler) == -(-num_rows // size) == len(list(sampler))
    by_rate = PoissonBatchSampler(num_rows=num_rows, sample_rate=size / num_rows)
    assert len(by_rate) == len(sampler)
    assert by_rate.batch_size == pytest.approx(size, rel=1e-15)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 9), st.booleans())
def test_pieces_join_to_the_logical_batch(num_rows, size, piece, micro):
    size = min(size, num_rows)
    split = {"micro_batches": piece} if micro else {"max_physical_batch_size": piece}
    with pytest.warns(PrivacyWarning):
        whole = PoissonBatchSampler(num_rows=num_rows, batch_size=size, steps=6, seed=3)
        parts = PoissonBatchSampler(num_rows=num_rows, batch_size=size, steps=6, seed=3, **split)
    joined: list[list[int]] = [[]]
    pieces = 0
    for rows in parts:
        emission = parts.emissions.take(len(rows))
        assert emission.step == len(joined) - 1
        pieces += 1
        joined[-1] += [] if emission.placeholder else rows
        assert len(rows) <= piece or micro
        if emission.last:
            assert not micro or pieces == piece
            pieces = 0
            joined.append([])
    expected = []
    for rows in whole:
        expected.append([] if whole.emissions.take(len(rows)).placeholder else rows)
    assert joined == [*expected, []]


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ({"num_rows": 10}, ValueError, "batch_size and sample_rate"),
        ({"num_rows": 10, "batch_size": 2, "sample_rate": 0.1}, ValueError, "batch_size and sample_rate"),
        ({"batch_size": 2}, ValueError, "dataset and num_rows"),
        ({"dataset": range(3), "num_rows": 3, "batch_size": 2}, ValueError, "dataset and num_rows"),
        ({"dataset": iter([1]), "batch_size": 1}, TypeError, "dataset"),
        ({"dataset": [], "batch_size": 1}, ValueError, "dataset"),
        ({"num_rows": 10, "batch_size": 0}, ValueError, "batch_size"),
        ({"num_rows": 10, "batch_size": 11}, ValueError, "batch_size"),
        ({"num_rows": 10, "batch_size": "2"}, TypeError, "batch_size"),
        ({"num_rows": 10, "batch_size": float("nan")}, ValueError, "batch_size"),
        ({"num_rows": 10, "sample_rate": 0.0}, ValueError, "sample_rate"),
        ({"num_rows": 10, "sample_rate": 1.5}, ValueError, "sample_rate"),
        ({"num_rows": 10, "batch_size": 2, "steps": 0}, ValueError, "steps"),
        ({"num_rows": 10, "batch_size": 2, "seed": -1}, ValueError, "seed"),
        ({"num_rows": 10, "batch_size": 2, "max_physical_batch_size": 0}, ValueError, "max_physical_batch_size"),
        ({"num_rows": 10, "batch_size": 2, "micro_batches": 1.5}, TypeError, "micro_batches"),
        (
            {"num_rows": 10, "batch_size": 2, "micro_batches": 2, "max_physical_batch_size": 2},
            ValueError,
            "micro_batches",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, error, names):
    with pytest.raises(error, match=names):
        PoissonBatchSampler(**arguments)
