"""Reconciliation of what was emitted with what was seen, through real DataLoaders."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader, Dataset

from paddle_privacy.errors import PrivacyError
from paddle_privacy.sampling import Emissions, PoissonBatchSampler
from paddle_privacy.sampling.emissions import Emission


class Rows(Dataset):
    """Rows that say which they are, in the shapes that data sets come in."""

    def __init__(self, size: int, kind: str = "tuple") -> None:
        self.size, self.kind = size, kind

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i):
        x = np.full(3, i, dtype=np.float32)
        return {
            "array": x,
            "tuple": (x, np.int64(i)),
            "dict": {"x": x, "y": np.int64(i)},
            "nested": {"x": [x, {"z": (x, np.int64(i))}]},
            "string": {"text": f"row {i}", "x": x},
        }[self.kind]


def first_column(batch) -> list[int]:
    while not isinstance(batch, paddle.Tensor):
        batch = batch["x"] if isinstance(batch, dict) else batch[0]
    return [int(v) for v in batch[:, 0]]


@pytest.mark.parametrize("kind", ["array", "tuple", "dict", "nested", "string"])
@pytest.mark.parametrize("workers", [0, 2])
def test_empty_and_uneven_batches_need_nothing_from_the_loop(kind, workers):
    sampler = PoissonBatchSampler(num_rows=20, batch_size=1, steps=25)
    loader = DataLoader(Rows(20, kind), batch_sampler=sampler, num_workers=workers)
    empty = 0
    for batch in loader:
        rows = first_column(batch)
        emission = sampler.emissions.take(len(rows))
        assert emission.last
        if emission.placeholder:
            empty += 1
            assert rows == [0]
        else:
            assert emission.rows == len(rows)
    # P(no empty batch in 25 draws at 36 %) = 2e-5; P(all empty) is smaller still.
    assert 0 < empty < 25
    assert sampler.emissions.pending == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_order_survives_prefetching(workers):
    """Emissions come in the order of the batches, also when workers finish out of order."""
    with pytest.warns(UserWarning):
        sampler = PoissonBatchSampler(num_rows=50, batch_size=5, steps=40, max_physical_batch_size=2, seed=1)
        twin = PoissonBatchSampler(num_rows=50, batch_size=5, steps=40, max_physical_batch_size=2, seed=1)
    loader = DataLoader(Rows(50), batch_sampler=sampler, num_workers=workers)
    for batch, expected in zip(loader, twin):
        assert first_column(batch) == expected
        assert sampler.emissions.take(len(expected)) == twin.emissions.take(len(expected))


def sampler_of(sizes: list[int]) -> PoissonBatchSampler:
    """A sampler whose draws have known sizes."""
    sampler = PoissonBatchSampler(num_rows=100, batch_size=5, steps=len(sizes))
    generation, _ = sampler.emissions.restart()
    for step, size in enumerate(sizes):
        sampler.emissions.record(Emission(size, size == 0, True, generation, step))
    return sampler


def test_a_mismatch_is_refused_and_changes_nothing():
    emissions = sampler_of([3, 0, 4]).emissions
    for wrong in (2, 4, 1):
        with pytest.raises(PrivacyError, match="saw . rows where the Poisson sampler emitted 3 rows"):
            emissions.take(wrong)
    assert emissions.take(3).rows == 3
    with pytest.raises(PrivacyError, match="emitted an empty batch"):
        emissions.take(4)
    assert emissions.take(1).placeholder
    assert emissions.take(4).step == 2
    with pytest.raises(PrivacyError, match="emitted none"):
        emissions.take(4)


def test_a_new_iteration_closes_the_old_one():
    sampler = PoissonBatchSampler(num_rows=30, batch_size=6, steps=3, max_physical_batch_size=1)
    loader = DataLoader(Rows(30), batch_sampler=sampler)
    for batch in loader:
        kept = sampler.emissions.take(len(batch[0]))
        break
    for batch in loader:
        fresh = sampler.emissions.take(len(batch[0]))
        break
    assert (kept.generation, fresh.generation, sampler.emissions.generation) == (1, 2, 2)
    assert fresh.step == 0


def test_a_delivering_loader_makes_reconciliation_exact():
    emissions = Emissions()
    generation, _ = emissions.restart()
    for step in range(4):
        emissions.record(Emission(5, False, True, generation, step))
    emissions.deliver(generation)
    assert emissions.take(5).step == 0
    with pytest.raises(PrivacyError, match="second time on the same batch"):
        emissions.take(5)
    emissions.deliver(generation)
    emissions.deliver(generation)
    assert emissions.take(5).step == 2
    _, leftovers = emissions.restart()
    assert [e.step for e in leftovers] == [3]
    with pytest.raises(PrivacyError, match="second iteration"):
        emissions.deliver(generation)


def test_an_abandoned_iteration_cannot_write_into_the_new_queue():
    sampler = PoissonBatchSampler(num_rows=30, batch_size=6, steps=5)
    old = iter(sampler)
    next(old)
    new = iter(sampler)
    next(old)
    next(old)
    assert sampler.emissions.pending == 0
    assert sampler.emissions.take(len(next(new))).generation == 2
