"""The exponent fit and the attribution of a trace, on data whose answers are known."""

from __future__ import annotations

import pytest
from curves import exponent
from profile_step import own_times


@pytest.mark.parametrize("slope", [0.0, 1.0, 2.0])
def test_exponent_of_a_power_law(slope):
    x = [10, 20, 40, 80, 160]
    assert exponent(x, [3 * value**slope for value in x]) == pytest.approx(slope, abs=1e-12)


def test_exponent_is_that_of_the_upper_half():
    x = [1, 2, 4, 8, 16, 32]
    # Flat, then quadratic: constant costs at small values do not hide the growth.
    assert exponent(x, [64, 64, 64, 64, 256, 1024]) == pytest.approx(2.0)


def test_own_times_leave_out_what_is_nested_and_go_to_the_innermost_section():
    def event(name, start, duration):
        return {"name": f"{name}[{duration} us]", "ts": start, "dur": duration}

    events = [
        event("ProfileStep#0", 0, 100000),
        event("section: backward", 1000, 50000),
        event("matmul_grad kernel launch", 2000, 10000),
        event("section: norms", 20000, 8000),
        event("native ghost_squared_norm", 21000, 5000),
        event("section: update", 60000, 4000),
    ]
    assert sorted(own_times(events), key=str) == [
        ("backward", "matmul_grad", 10.0),
        ("backward", None, 32.0),
        ("norms", "native ghost_squared_norm", 5.0),
        ("norms", None, 3.0),
        ("update", None, 4.0),
    ]
