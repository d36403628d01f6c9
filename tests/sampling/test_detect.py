"""What loaders of every kind really do, and that passes over them are never under-counted."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest
from paddle import io

from paddle_privacy.errors import PrivacyError
from paddle_privacy.sampling import (
    PassCounter,
    PoissonBatchSampler,
    detect_sampling,
    find_live_loader,
    live_iterators,
)


class Rows(io.Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i):
        return np.float32(i)


class Stream(io.IterableDataset):
    def __iter__(self):
        yield from range(5)


class Custom(io.BatchSampler):
    def __iter__(self):
        while True:
            yield [0, 0]


class Biased(io.RandomSampler):
    def __iter__(self):
        return iter([0] * len(self.data_source))


@pytest.mark.parametrize("num_rows", [1, 7, 99, 100, 105, 12_345])
@pytest.mark.parametrize("size", [1, 10, 64])
@pytest.mark.parametrize("drop_last", [False, True])
def test_shuffled_loaders_are_counted_in_integers(num_rows, size, drop_last):
    loader = io.DataLoader(Rows(num_rows), batch_size=size, shuffle=True, drop_last=drop_last)
    scheme = detect_sampling(loader)
    assert (scheme.kind, scheme.num_rows, scheme.batch_size) == ("shuffle", num_rows, size)
    assert scheme.steps_per_epoch == len(loader)
    assert scheme.sample_rate == min(1, size / num_rows)


def test_a_poisson_sampler_is_recognised():
    sampler = PoissonBatchSampler(num_rows=105, batch_size=10)
    scheme = detect_sampling(io.DataLoader(Rows(105), batch_sampler=sampler))
    assert scheme.kind == "poisson"
    assert scheme.sampler is sampler
    assert (scheme.num_rows, scheme.batch_size, scheme.steps_per_epoch) == (105, 10, 11)


@pytest.mark.parametrize(
    "order",
    [io.SequenceSampler(Rows(9)), io.RandomSampler(Rows(9)), io.SubsetRandomSampler([3, 1, 2]), range(4)],
)
def test_orders_that_visit_a_row_once(order):
    scheme = detect_sampling(io.BatchSampler(sampler=order, batch_size=2))
    assert scheme.kind == "shuffle"
    assert scheme.num_rows == len(order)


@pytest.mark.parametrize(
    "loader",
    [
        io.DataLoader(Rows(9), batch_sampler=Custom(Rows(9), batch_size=2)),
        io.DataLoader(Rows(9), batch_size=None),
        io.BatchSampler(sampler=Biased(Rows(9)), batch_size=2),
        io.BatchSampler(sampler=io.RandomSampler(Rows(9), generator=iter([0, 0])), batch_size=2),
        io.BatchSampler(sampler=io.WeightedRandomSampler(np.ones(9), 5, replacement=False), batch_size=2),
        io.BatchSampler(sampler=[0, 0, 0], batch_size=2),
    ],
)
def test_what_cannot_be_proven_is_unknown(loader):
    scheme = detect_sampling(loader)
    assert scheme.kind == "unknown"
    assert scheme.num_rows is None
    assert scheme.reason


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (io.BatchSampler(sampler=io.RandomSampler(Rows(9), replacement=True), batch_size=2), "replacement=True"),
        (io.BatchSampler(sampler=io.WeightedRandomSampler(np.ones(9), 5), batch_size=2), "WeightedRandomSampler"),
        (io.BatchSampler(sampler=io.SubsetRandomSampler([1, 1]), batch_size=2), "repeat"),
        (io.DataLoader(Stream(), batch_size=2), "IterableDataset"),
        (io.DistributedBatchSampler(Rows(9), batch_size=2, num_replicas=2, rank=0), "repeats rows"),
    ],
)
def test_what_repeats_a_row_in_a_batch_is_refused(loader, says):
    with pytest.raises(PrivacyError, match=says):
        detect_sampling(loader)


def test_distributed_samplers_cover_the_ranks():
    scheme = detect_sampling(io.DistributedBatchSampler(Rows(12), batch_size=4, num_replicas=2, rank=1))
    assert (scheme.kind, scheme.num_rows, scheme.batch_size, scheme.steps_per_epoch) == ("shuffle", 12, 8, 2)
    alone = detect_sampling(io.DistributedBatchSampler(Rows(9), batch_size=4, num_replicas=1, rank=0))
    assert (alone.num_rows, alone.batch_size, alone.steps_per_epoch) == (9, 4, 3)


def test_not_a_loader():
    with pytest.raises(TypeError, match="data_loader must be a paddle.io.DataLoader, got list"):
        detect_sampling([1, 2])


@pytest.fixture
def quiet():
    """No loader of an earlier test is in use, though its reader thread may still wait for somebody."""
    gc.collect()
    assert live_iterators() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_in_use_is_found(quiet, workers):
    train = io.DataLoader(Rows(300), batch_size=4, shuffle=True, num_workers=workers)
    assert find_live_loader() is None
    for _ in train:
        assert detect_sampling(find_live_loader()).num_rows == 300
        other = iter(io.DataLoader(Rows(500), batch_size=1))
        next(other)
        assert find_live_loader() is None
        del other
        assert detect_sampling(find_live_loader()).num_rows == 300
        break
    assert find_live_loader() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_peeking_at_a_batch_is_not_a_pass(quiet, workers):
    loader = io.DataLoader(Rows(300), batch_size=4, shuffle=True, num_workers=workers)
    next(iter(loader))
    passes = PassCounter(detect_sampling(loader))
    for _ in loader:
        passes.observe()
        next(iter(loader))
        if len(live_iterators()) != 1:
            pytest.fail("a peeked-at iterator counts as in use")
        if passes._batches == 5:
            break
    assert passes.passes == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_come_from_elsewhere_are_a_pass_each(quiet, workers):
    """A loop was left and its loader lives on in its thread; what is used now is not from it."""
    loader = io.DataLoader(Rows(300), batch_size=4, shuffle=True, num_workers=workers)
    passes = PassCounter(detect_sampling(loader))
    for _ in loader:
        passes.observe()
        break
    assert [passes.observe() for _ in range(5)] == [1] * 5


@pytest.mark.parametrize("workers", [0, 2])
def test_passes_are_counted_by_iteration(quiet, workers):
    loader = io.DataLoader(Rows(30), batch_size=4, shuffle=True, num_workers=workers)
    passes = PassCounter(detect_sampling(loader))
    for epoch in range(3):
        for _ in loader:
            passes.observe()
        assert passes.passes == epoch + 1
    for broken in range(3):
        for i, _ in enumerate(loader):
            assert passes.observe() == int(i == 0)
            if i == 2:
                break
        assert passes.passes == 4 + broken


def test_persistent_workers_begin_a_pass_with_the_same_iterator(quiet):
    loader = io.DataLoader(Rows(12), batch_size=4, num_workers=1, persistent_workers=True)
    passes = PassCounter(detect_sampling(loader))
    for _ in range(2):
        for _ in loader:
            passes.observe()
    assert passes.passes == 2


def test_loops_that_take_turns_are_a_pass_each(quiet):
    loader = io.DataLoader(Rows(40), batch_size=4, shuffle=True)
    passes = PassCounter(detect_sampling(loader))
    one, two = iter(loader), iter(loader)
    next(one), next(two)
    assert passes.observe() == 2
    three = iter(loader)
    next(three)
    assert passes.observe() == 1
    assert passes.observe() == 0


def test_another_loader_does_not_disturb(quiet):
    loader = io.DataLoader(Rows(40), batch_size=4, shuffle=True)
    passes = PassCounter(detect_sampling(loader))
    for _ in loader:
        passes.observe()
        for _ in io.DataLoader(Rows(8), batch_size=4):
            pass
    assert passes.passes == 1


def test_batches_without_a_loop_are_a_pass_each(quiet):
    loader = io.DataLoader(Rows(12), batch_size=4, shuffle=True)
    kept = list(loader)
    passes = PassCounter(detect_sampling(loader))
    for _ in kept:
        assert passes.observe() == 1


def test_using_batches_twice_is_noticed(quiet):
    loader = io.DataLoader(Rows(12), batch_size=4, shuffle=True)
    passes = PassCounter(detect_sampling(loader))
    for _ in loader:
        for _ in range(2):
            passes.observe()
    assert passes.passes >= 2


def test_only_shuffled_schemes_have_passes():
    with pytest.raises(ValueError, match="kind"):
        PassCounter(detect_sampling(PoissonBatchSampler(num_rows=9, batch_size=3)))


def test_threads_that_search_at_once_do_not_take_an_abandoned_loader_for_one_in_use(quiet):
    """Each search holds references of its own, which another one must not count as owners."""
    loader = io.DataLoader(Rows(100), batch_size=4)
    next(iter(loader))  # made to peek at a batch: its reader thread lives on
    assert find_live_loader() is None
    found = []

    def search():
        for _ in range(8):
            found.append(find_live_loader())

    threads = [threading.Thread(target=search) for _ in range(6)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert found == [None] * 48
