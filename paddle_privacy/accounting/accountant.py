"""What every accountant does: keep the history of events, and answer with ε or δ."""

from __future__ import annotations

import abc
import math
from typing import Any, ClassVar, TypeVar

from ..errors import UnsupportedEvent
from .events import Event, Gaussian, JsonDict, PoissonSampled, merge_relations
from .mechanism import SampledGaussian, Truncation, decompose

Totals = dict[SampledGaussian, int]
Self = TypeVar("Self", bound="Accountant")


class Accountant(abc.ABC):
    """Composes events and bounds the privacy loss of all of them together.

    The guarantee: for neighbouring data sets D, D' (``relation``) that differ in ``group_size`` rows and every set S
    of outputs, P[M(D) ∈ S] <= e^ε P[M(D') ∈ S] + δ, where M is the whole history, each event possibly chosen after
    seeing the outputs before it. Numbers are upper bounds: ε and δ are never below the truth.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._history: list[tuple[Event, int]] = []
        self._totals: Totals = {}
        self._truncations: dict[Truncation, int] = {}
        self._relation: str | None = None

    @classmethod
    def supports(cls, event: Event) -> bool:
        """Whether this kind of accountant has a sound bound for ``event``."""
        try:
            cls._check(event)
        except UnsupportedEvent:
            return False
        return True

    @classmethod
    def _check(cls, event: Event) -> tuple[tuple[tuple[SampledGaussian | Truncation, int], ...], str]:
        if not isinstance(event, Event):
            raise TypeError(f"event must be an accounting event such as Gaussian(1.0), got {event!r}.")
        return decompose(event)

    @property
    def history(self) -> list[tuple[Event, int]]:
        """All composed events in order as ``(event, count)``, equal neighbours merged (a copy)."""
        return list(self._history)

    @property
    def relation(self) -> str | None:
        """The neighbouring relation of the total, or None before the first event."""
        return self._relation

    def compose(self: Self, event: Event, count: int = 1) -> Self:
        """Adds ``event``, ``count`` times; constant time when events repeat. Returns the accountant.

        Raises:
            UnsupportedEvent: no sound bound for the event, or its relation does not mix with the history's; the
                total is unchanged.
        """
        if isinstance(count, bool) or not hasattr(count, "__index__") or count < 0:
            raise ValueError(f"count must be an integer >= 0, got {count!r}.")
        count = count.__index__()
        parts, relation = self._check(event)
        relation = merge_relations(self._relation, relation)
        if count == 0:
            return self
        self._relation = relation
        if self._history and self._history[-1][0] == event:
            self._history[-1] = (event, self._history[-1][1] + count)
        else:
            self._history.append((event, count))
        for mechanism, times in parts:
            if isinstance(mechanism, Truncation):
                self._truncations[mechanism] = self._truncations.get(mechanism, 0) + times * count
            else:
                self._totals[mechanism] = self._totals.get(mechanism, 0) + times * count
                self._added(mechanism, times * count)
        return self

    def _added(self, mechanism: SampledGaussian, count: int) -> None:
        """Called for every mechanism that enters the total, for accountants that keep running sums."""
        return

    def step(self: Self, noise_multiplier: float, sample_rate: float, num_steps: int = 1) -> Self:
        """Composes ``num_steps`` steps of DP-SGD: Poisson batches at ``sample_rate``, Gaussian noise σ·C.

        ``sample_rate`` = 1 is the Gaussian without sampling.
        """
        inner = Gaussian(noise_multiplier)
        sampled = PoissonSampled(sample_rate, inner)
        return self.compose(inner if sampled.sample_rate == 1 else sampled, num_steps)

    def get_epsilon(self, delta: float, group_size: int = 1) -> float:
        """The smallest ε this accountant can prove at ``delta``; ``math.inf`` where it can prove none.

        ``group_size`` = k protects any k rows together instead of one.
        """
        check_delta(delta)
        check_group_size(group_size)
        delta = float(delta)
        slack = self._truncation_probability(group_size)
        if slack == 0:
            return self._epsilon(delta, group_size)
        # δ(ε) = δ_sampled(ε) + (1 + e^ε)·slack. The iteration climbs to the smallest ε that satisfies it.
        epsilon = 0.0
        for _ in range(200):
            if epsilon > 700 or (1 + math.exp(epsilon)) * slack >= delta:
                return math.inf
            following = self._epsilon(delta - (1 + math.exp(epsilon)) * slack, group_size)
            if following <= epsilon:
                return epsilon
            epsilon = following + 1e-9 * (1 + following)
        return math.inf

    def get_delta(self, epsilon: float, group_size: int = 1) -> float:
        """The smallest δ this accountant can prove at ``epsilon`` >= 0; at most 1."""
        epsilon = float(epsilon)
        if not epsilon >= 0:
            raise ValueError(f"epsilon must be a number >= 0, got {epsilon!r}.")
        check_group_size(group_size)
        if math.isinf(epsilon):
            return 1.0 if math.isinf(self._epsilon(0.5, group_size)) else 0.0
        delta = self._delta(epsilon, group_size)
        slack = self._truncation_probability(group_size)
        if slack > 0:
            delta += (1 + math.exp(min(epsilon, 700.0))) * slack
        return min(1.0, delta)

    def _truncation_probability(self, group_size: int) -> float:
        """Bounds the distance between the run and the same run without truncation (union over all steps)."""
        return sum(count * part.probability(group_size) for part, count in self._truncations.items())

    @abc.abstractmethod
    def _epsilon(self, delta: float, group_size: int) -> float:
        """ε of ``self._totals`` at ``delta``."""

    @abc.abstractmethod
    def _delta(self, epsilon: float, group_size: int) -> float:
        """δ of ``self._totals`` at ``epsilon``."""

    def copy(self: Self) -> Self:
        """An independent accountant with the same history, cheap enough to look one step ahead at every step."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._history = list(self._history)
        other._totals = dict(self._totals)
        other._truncations = dict(self._truncations)
        return other

    def state_dict(self) -> JsonDict:
        """JSON-able; the history is the whole truth, numbers are recomputed from it."""
        history = [{"event": event.to_dict(), "count": count} for event, count in self._history]
        return {"version": 1, "accountant": self.name, "relation": self._relation, "history": history}

    def load_state_dict(self, state: JsonDict) -> None:
        """Replaces the history by the one in ``state``.

        A state saved by another kind of accountant is accepted as long as this one supports its events: the history
        does not depend on how it is bounded. Nothing changes when the state is refused.
        """
        if not isinstance(state, dict) or "history" not in state:
            raise ValueError("state must be a dict made by state_dict(), with a 'history'.")
        if state.get("version") != 1:
            raise ValueError(f"state has version {state.get('version')!r}; this library reads version 1.")
        fresh = self._fresh()
        for entry in state["history"]:
            fresh.compose(Event.from_dict(entry["event"]), entry["count"])
        if fresh._relation != state.get("relation"):
            raise ValueError(
                f"state names the relation {state.get('relation')!r} but its history gives {fresh._relation!r}."
            )
        self.__dict__.update(fresh.__dict__)

    def _fresh(self: Self) -> Self:
        return type(self)()

    def __len__(self) -> int:
        """Number of composed events, repetitions counted."""
        return sum(count for _, count in self._history)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(events={len(self)}, relation={self._relation!r})"


def check_delta(delta: Any, name: str = "delta") -> None:
    """Raises ValueError or TypeError unless 0 < delta < 1."""
    try:
        inside = 0 < float(delta) < 1
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a real number, got {delta!r}.") from None
    if not inside:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {delta!r}.")


def check_group_size(group_size: Any) -> None:
    """Raises ValueError unless ``group_size`` is an integer >= 1."""
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size must be an integer >= 1, got {group_size!r}.")
