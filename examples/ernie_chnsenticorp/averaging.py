"""`--ema`: an exponential moving average of the weights, which noise moves less than the weights themselves.

Post-processing of weights that are already private, so it costs no ε (De et al. 2022, arXiv:2204.13650, section 3.4).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import paddle


class MovingAverage:
    """``average ← d·average + (1-d)·weights`` after each step, with d = min(decay, (1+t)/(10+t)) at step t.

    The smaller d of the first steps forgets the initial weights in time.
    """

    def __init__(self, parameters: Sequence[Any], decay: float) -> None:
        self.parameters = list(parameters)
        self.decay = decay
        self.steps = 0
        self.average = [parameter.detach().clone() for parameter in self.parameters]

    def update(self) -> None:
        self.steps += 1
        keep = min(self.decay, (1 + self.steps) / (10 + self.steps))
        with paddle.no_grad():
            for average, parameter in zip(self.average, self.parameters):
                average.scale_(keep).add_(parameter.detach() * (1 - keep))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the parameters hold the average; afterwards their own values again."""
        own = [parameter.detach().clone() for parameter in self.parameters]
        self.put_in_place()
        try:
            yield
        finally:
            for parameter, value in zip(self.parameters, own):
                parameter.set_value(value)

    def put_in_place(self) -> None:
        for parameter, average in zip(self.parameters, self.average):
            parameter.set_value(average)
