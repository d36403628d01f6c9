"""The planning model of benchmarks/scaling.py against what it must be at its edges."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from scaling import (
    Link,
    crossover_rows,
    exchange_bytes,
    exchange_seconds,
    fitted,
    held_bytes,
    predicted_ms,
    step_flops,
)


def test_bytes_of_a_ring():
    assert exchange_bytes(10**6, 1) == 0
    assert exchange_bytes(10**6, 2) == 4 * 10**6 + 24
    assert exchange_bytes(10**6, 10**6) == pytest.approx(8 * 10**6, rel=1e-4)


@pytest.mark.parametrize("world", [2, 4])
def test_a_link_is_recovered_from_two_exchanges(world):
    link, sizes = Link(2e9, 3e-4), (10**5, 10**6)
    times = [1e3 * (exchange_seconds(n, world, link) - 24 / link.bandwidth) for n in sizes]
    found = fitted(times, sizes, world)
    assert found.bandwidth == pytest.approx(link.bandwidth) and found.latency == pytest.approx(link.latency)


def test_compute_and_exchange_are_equal_at_the_crossover():
    link, speed = Link(25e9, 0.0), 200e12
    rows = crossover_rows(10**8, 10**8, 128, 1024, 64, link, speed)
    assert rows * step_flops(10**8, 10**8, 1, 128, 1024) / speed == pytest.approx(exchange_seconds(10**8, 64, link))
    assert crossover_rows(10**8, 10**6, 128, 1024, 64, link, speed) < rows / 50  # LoRA: a hundredth of the bytes


def test_norms_never_cost_more_than_per_sample_gradients():
    for tokens in (1, 100, 10**5):
        plain = 6.0 * 10**6 * 4 * tokens
        assert plain < step_flops(10**6, 10**6, 4, tokens, 512) <= plain + 2.0 * 10**6 * 4 * tokens


def test_ranks_beyond_the_cores_take_turns_and_wait_for_the_slowest():
    link = Link(2e9, 1e-4)
    alone, steady, uneven = [10.0], [12.0], [10.0, 11.0, 12.0, 13.0, 30.0]
    assert predicted_ms(alone, steady, 10**6, 1, 2, link) == 10.0
    two = predicted_ms(alone, steady, 10**6, 2, 2, link)
    assert two == pytest.approx(12.0 + 1e3 * exchange_seconds(10**6, 2, link))
    four = predicted_ms(alone, steady, 10**6, 4, 2, link)
    assert four == pytest.approx(2 * (12.0 + 1e3 * exchange_seconds(10**6, 4, link)))
    assert predicted_ms(alone, steady, 10**6, 4, 64, link) == pytest.approx(four / 2)
    # The median of the slowest of W, against drawing them.
    drawn = np.random.RandomState(0).exponential(1.0, [4, 40_000])
    waited = predicted_ms(alone, drawn[0], 1, 4, 4, Link(1e30, 0.0))
    assert waited == pytest.approx(np.median(drawn.max(axis=0)), rel=0.03)
    assert predicted_ms(alone, uneven, 10**6, 4, 4, link) > predicted_ms(alone, uneven, 10**6, 2, 4, link)


def test_sharding_divides_the_moments_and_nothing_else():
    whole, many = held_bytes(10**9, 10**9, 1, True), held_bytes(10**9, 10**9, 10**6, True)
    assert whole == held_bytes(10**9, 10**9, 8, False) == 16 * 10**9
    assert many == pytest.approx(8 * 10**9, rel=1e-5)
    assert held_bytes(10**9, 10**6, 8, False) < 1.01 * 4 * 10**9  # LoRA
