"""Noise multipliers and clip norms that change from step to step, by a rule fixed before training.

A schedule is a function of the number of private steps taken, and of nothing else: whoever knows the rule knows every
value, so the values themselves reveal nothing and each step is charged for the σ that it really used. Pass one as
``noise_multiplier=`` or ``clip_norm=``::

    DPSGD(..., noise_multiplier=ExponentialSchedule(1.5, 0.999), clip_norm=StepSchedule(1.0, 0.5, every=1000))

There is one value of each at any time. The clip norm moves only between updates, the noise of an update is σ times the
sensitivity with which its samples were clipped, and the accountant is given that same σ, so the three cannot drift
apart. Where batches are shuffled, a pass over the data is charged for the smallest σ that any of its steps can have,
because a row may take part in any of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class Schedule(ABC):
    """Base of all schedules; call one with the number of private steps already taken (0 for the first)."""

    def __call__(self, step: int) -> float:
        """The value for that step: finite and >= 0, else ValueError."""
        value = self._value(step)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{self!r} gives {value!r} at step {step}; it must give a number")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{self!r} gives {value!r} at step {step}; it must be finite and >= 0")
        return float(value)

    @abstractmethod
    def _value(self, step: int) -> float: ...


class ExponentialSchedule(Schedule):
    """initial · factor^⌊step/every⌋, for example the noise decay of Du et al. 2021 ("Dynamic DP-SGD") with factor < 1.

    Args:
        initial: value of the first step, > 0.
        factor: what each period multiplies it by, > 0.
        every: steps a period; steps per epoch for a value that changes once an epoch.
    """

    def __init__(self, initial: float, factor: float, *, every: int = 1):
        self.initial, self.factor = _positive("initial", initial), _positive("factor", factor)
        self.every = _count("every", every)

    def _value(self, step: int) -> float:
        return self.initial * self.factor ** (step // self.every)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.initial:g}, {self.factor:g}, every={self.every})"


class StepSchedule(ExponentialSchedule):
    """A staircase: multiplied by `factor` once every `every` steps."""

    def __init__(self, initial: float, factor: float, *, every: int):
        super().__init__(initial, factor, every=every)


class LambdaSchedule(Schedule):
    """Any rule ``function(step) -> value``.

    The guarantee needs the rule to be fixed before training: a function that looks at the training data, the loss or
    the gradients would release them without noise. It must give the same value each time it is asked for a step.
    """

    def __init__(self, function: Callable[[int], float]):
        if not callable(function):
            raise TypeError(f"function must be callable with a step number, found {function!r}")
        self.function = function
        self._given: dict[int, float] = {}

    def _value(self, step: int) -> float:
        value = self.function(step)
        # Charged for one value and noised with another would be a wrong ε.
        if self._given.setdefault(step, value) != value:
            raise ValueError(f"{self!r} gave {self._given[step]!r} and now gives {value!r} for step {step}")
        return value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.function, '__name__', type(self.function).__name__)})"


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number > 0, found {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be finite and > 0, found {value!r}")
    return float(value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer number of steps, found {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1 step, found {value!r}")
    return value
