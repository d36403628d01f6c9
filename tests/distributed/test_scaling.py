"""The planning model of benchmarks/scaling.py against what it must be at its edges."""

from __future__ import annotations

import sys
from pathlib import Path

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


def test_ranks_beyond_the_cores_take_turns():
    link = Link(2e9, 1e-4)
    alone, crowded = 10.0, 12.0
    assert predicted_ms(alone, crowded, 10**6, 1, 2, link) == alone
    two = predicted_ms(alone, crowded, 10**6, 2, 2, link)
    assert two == pytest.approx(crowded + 1e3 * exchange_seconds(10**6, 2, link))
    four = predicted_ms(alone, crowded, 10**6, 4, 2, link)
    assert four == pytest.approx(2 * (crowded + 1e3 * exchange_seconds(10**6, 4, link)))
    assert predicted_ms(alone, crowded, 10**6, 4, 64, link) < four / 1.9


def test_sharding_divides_the_moments_and_nothing_else():
    whole, many = held_bytes(10**9, 10**9, 1, True), held_bytes(10**9, 10**9, 10**6, True)
    assert whole == held_bytes(10**9, 10**9, 8, False) == 16 * 10**9
    assert many == pytest.approx(8 * 10**9, rel=1e-5)
    assert held_bytes(10**9, 10**6, 8, False) < 1.01 * 4 * 10**9  # LoRA
