"""What a mechanism did to the data, said by the mechanism itself.

Samplers and optimizers emit events; accountants only consume them, so that a sampling scheme can never be
accounted for as another one. An event is an immutable value: comparable, hashable and JSON-able.

Units and relations
-------------------
``noise_multiplier`` is σ relative to the bound C on what *one row* adds to the sum (its clip norm), under every
relation. What changes with the relation is how far neighbouring data sets can move the sum:

===================== ============================================== ==============================
``relation``          neighbours                                     distance of the sums, in C
===================== ============================================== ==============================
``add_or_remove_one`` one row is present or absent                   1
``zero_out``          one row counts, or counts as zero; N is fixed  1
``replace_one``       one row is exchanged for another; N is fixed   2
===================== ============================================== ==============================
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedEvent

RELATIONS = ("add_or_remove_one", "zero_out", "replace_one")
JsonDict = dict[str, Any]


def merge_relations(first: str | None, second: str) -> str:
    """The one relation under which a guarantee for ``first`` and a guarantee for ``second`` both hold.

    Zeroing a row out moves a sum of clipped rows exactly as removing the row does, and it leaves the sampling of
    the other rows alone. Every event that is bounded here under ``add_or_remove_one`` is therefore bounded by the
    same number under ``zero_out``, and a mixture of the two is stated under ``zero_out``. The converse does not
    hold (adding a row to a shuffled epoch moves the other rows between batches). ``replace_one`` needs twice the
    sensitivity and mixes with neither.

    Raises:
        UnsupportedEvent: ``replace_one`` beside another relation.
    """
    if first is None or first == second:
        return second
    if {first, second} == {"add_or_remove_one", "zero_out"}:
        return "zero_out"
    raise UnsupportedEvent(
        f"An event under relation {second!r} cannot be composed with events under {first!r}: a guarantee for one "
        "does not imply the other; state all of them under one relation with event.under(relation)."
    )


@dataclass(frozen=True)
class Event:
    """Base of all events."""

    @property
    def relation(self) -> str:
        """The neighbouring relation under which the event is bounded."""
        raise TypeError(f"{type(self).__name__} has no relation of its own")

    def under(self, relation: str) -> Event:
        """The same mechanism, with its guarantee asked for under another relation.

        Raises:
            UnsupportedEvent: the mechanism has no bound under ``relation`` (fixed batches under add_or_remove_one).
        """
        _check_relation(relation)
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Event):
                changes[field.name] = value.under(relation)
            elif isinstance(value, tuple):
                changes[field.name] = tuple(item.under(relation) for item in value)
        changed = dataclasses.replace(self, **changes)
        if changed.relation != relation:
            raise UnsupportedEvent(
                f"{type(self).__name__} cannot be bounded under {relation!r}: its batches depend on which rows there "
                f"are; it can be stated under {changed.relation!r}."
            )
        return changed

    def to_dict(self) -> JsonDict:
        """A JSON-able dict; :meth:`from_dict` restores an equal event."""
        out: JsonDict = {"event": type(self).__name__}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Event):
                value = value.to_dict()
            elif isinstance(value, tuple):
                value = [item.to_dict() for item in value]
            # "event" is the name of the class; the event inside it goes by another.
            out["inner" if field.name == "event" else field.name] = value
        return out

    @staticmethod
    def from_dict(data: JsonDict) -> Event:
        """The event that :meth:`to_dict` described.

        Raises:
            ValueError: no event of that name, or a missing, unknown or impossible field.
        """
        if not isinstance(data, dict) or data.get("event") not in _EVENTS:
            name = data.get("event") if isinstance(data, dict) else data
            raise ValueError(f"Event {name!r} is unknown; this version knows {', '.join(sorted(_EVENTS))}.")
        kind = _EVENTS[data["event"]]
        arguments: dict[str, Any] = {}
        for key, value in data.items():
            if isinstance(value, dict):
                value = Event.from_dict(value)
            elif isinstance(value, list):
                value = tuple(Event.from_dict(item) for item in value)
            if key != "event":
                arguments["event" if key == "inner" else key] = value
        try:
            return kind(**arguments)
        except TypeError as error:
            raise ValueError(f"Event {data['event']} cannot be restored: {error}") from error


@dataclass(frozen=True)
class Gaussian(Event):
    """A sum of clipped rows plus N(0, (noise_multiplier·C)²) in every coordinate.

    ``noise_multiplier`` = 0 is allowed and costs ε = ∞.
    """

    noise_multiplier: float
    neighbours: str = "add_or_remove_one"

    def __post_init__(self) -> None:
        sigma = _real("noise_multiplier", self.noise_multiplier)
        if not 0 <= sigma < math.inf:
            raise ValueError(f"noise_multiplier must be a finite number >= 0, got {self.noise_multiplier!r}.")
        object.__setattr__(self, "noise_multiplier", sigma)
        _check_relation(self.neighbours)

    @property
    def relation(self) -> str:
        return self.neighbours

    def under(self, relation: str) -> Gaussian:
        _check_relation(relation)
        return Gaussian(self.noise_multiplier, relation)


@dataclass(frozen=True)
class PoissonSampled(Event):
    """``event`` on a batch that every row joins independently with probability ``sample_rate``.

    Everything that ``event`` composes sees the *same* batch: ``PoissonSampled(q, Composed((Gaussian(a),
    Gaussian(b))))`` is one draw of a batch and two noisy sums over it, that is one Gaussian with
    1/σ² = 1/a² + 1/b² (how adaptive clipping's noisy quantile count is charged, Andrew et al. 2021, Theorem 1).
    """

    sample_rate: float
    event: Event

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", _rate(self.sample_rate))
        _check_event("event", self.event)

    @property
    def relation(self) -> str:
        return self.event.relation


@dataclass(frozen=True)
class TruncatedPoisson(Event):
    """Poisson sampling whose batches never exceed ``max_batch_size``: larger ones lose rows uniformly at random.

    ``dataset_size`` is the largest number of rows the guarantee covers. The bound is that of Poisson sampling plus
    (1 + e^ε) times the chance that truncation ever happens, which is how far the two runs can differ in total variation
    (as in Chua et al. 2024, "Scalable DP-SGD: Shuffling vs. Poisson Subsampling").
    """

    sample_rate: float
    dataset_size: int
    max_batch_size: int
    event: Event

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", _rate(self.sample_rate))
        _check_count("dataset_size", self.dataset_size)
        _check_count("max_batch_size", self.max_batch_size)
        _check_event("event", self.event)

    @property
    def relation(self) -> str:
        return self.event.relation


@dataclass(frozen=True)
class FixedSize(Event):
    """``event`` on a batch of exactly ``batch_size`` of ``dataset_size`` rows, drawn without replacement.

    N is part of the mechanism, so the relation is ``zero_out``, or ``replace_one`` where the inner event says so.
    """

    dataset_size: int
    batch_size: int
    event: Event

    def __post_init__(self) -> None:
        _check_count("dataset_size", self.dataset_size)
        _check_count("batch_size", self.batch_size)
        if self.batch_size > self.dataset_size:
            raise ValueError(
                f"batch_size must be at most dataset_size = {self.dataset_size}, got {self.batch_size} "
                "(sampling is without replacement)."
            )
        _check_event("event", self.event)

    @property
    def relation(self) -> str:
        return _fixed_partition_relation(self.event)


@dataclass(frozen=True)
class ShuffledEpoch(Event):
    """One epoch over batches that partition the rows: each row takes part once, and no amplification is claimed.

    Stated under ``zero_out`` (adding a row would move the others between fixed batches), or ``replace_one`` where
    the inner event says so. Conditioned on the order of the rows, the batches without the row in question are
    post-processing, so an epoch costs what ``event`` costs once (parallel composition).
    """

    event: Event

    def __post_init__(self) -> None:
        _check_event("event", self.event)

    @property
    def relation(self) -> str:
        return _fixed_partition_relation(self.event)


@dataclass(frozen=True)
class Composed(Event):
    """Several events on the same data, each possibly chosen after seeing the earlier outputs."""

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
        if not self.events:
            raise ValueError("events must hold at least one event, got none.")
        for event in self.events:
            _check_event("events", event)
        _ = self.relation

    @property
    def relation(self) -> str:
        merged: str | None = None
        for event in self.events:
            merged = merge_relations(merged, event.relation)
        assert merged is not None
        return merged


@dataclass(frozen=True)
class SelfComposed(Event):
    """``event``, ``count`` times with independent randomness."""

    event: Event
    count: int

    def __post_init__(self) -> None:
        _check_event("event", self.event)
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise ValueError(f"count must be an integer >= 0, got {self.count!r}.")

    @property
    def relation(self) -> str:
        return self.event.relation


_EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (Gaussian, PoissonSampled, TruncatedPoisson, FixedSize, ShuffledEpoch, Composed, SelfComposed)
}


def combined_noise_multiplier(event: Event) -> float | None:
    """σ of the one Gaussian that ``event`` amounts to, or None where it is not a composition of Gaussians.

    Gaussians on the same data add their precisions: 1/σ² = Σ 1/σᵢ² (Dong, Roth, Su 2022, Corollary 3.3; adaptive
    choices included). Infinite where nothing was released.
    """
    precision = _precision(event)
    if precision is None:
        return None
    if precision == 0:
        return math.inf
    return 1 / math.sqrt(precision)


def _precision(event: Event) -> float | None:
    if isinstance(event, Gaussian):
        squared = event.noise_multiplier**2
        return 1 / squared if squared > 0 and 1 / squared < math.inf else math.inf
    if isinstance(event, SelfComposed):
        inner = _precision(event.event)
        return None if inner is None else (inner * event.count if event.count else 0.0)
    if isinstance(event, Composed):
        total = 0.0
        for part in event.events:
            inner = _precision(part)
            if inner is None:
                return None
            total += inner
        return total
    return None


def _fixed_partition_relation(event: Event) -> str:
    return "replace_one" if event.relation == "replace_one" else "zero_out"


def _check_relation(relation: Any) -> None:
    if relation not in RELATIONS:
        raise ValueError(f"relation must be one of {', '.join(RELATIONS)}; got {relation!r}.")


def _check_event(name: str, event: Any) -> None:
    if not isinstance(event, Event) or type(event) is Event:
        raise TypeError(f"{name} must be an accounting event such as Gaussian(1.0), got {event!r}.")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}.")


def _rate(value: Any) -> float:
    rate = _real("sample_rate", value)
    if not 0 <= rate <= 1:
        raise ValueError(f"sample_rate must lie in [0, 1], got {value!r}.")
    return rate


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        try:
            if isinstance(value, (bool, str, bytes)):
                raise TypeError
            value = value.__float__()
        except (AttributeError, TypeError, ValueError):
            raise TypeError(f"{name} must be a real number, got {value!r}.") from None
    value = float(value)
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, got NaN.")
    return value
