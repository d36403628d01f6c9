"""Everything a report states, collected once as plain data; the formats only lay it out.

Numbers come from verified ledgers. What people add (utility, audit, how tuning was done) is marked as theirs.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..accounting import Event, get_accountant
from ..accounting.rdp_accountant import RDPAccountant
from ..errors import LedgerError, UnsupportedEvent
from ..tradeoff import max_true_positive_rate, posterior_belief
from ..tuning import random_search_epsilon
from ..verify.chain import LedgerContents, PathLike
from ..verify.check import Verification, seeded, total_epsilon, verify_ledger
from ..version import __version__
from .text import text

ACCOUNTANTS = ("rdp", "zcdp", "pld")
GROUP_SIZES = (1, 2, 3, 5, 10)
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.1)
CURVE_POINTS = 200
HEADER_FIELDS = (
    "dataset_size",
    "batch_size",
    "sampling",
    "sampler",
    "sample_rate",
    "epochs",
    "noise_multiplier",
    "clip_norm",
    "clipping",
    "loss_reduction",
    "noise",
    "accountant",
    "delta",
    "optimizer",
    "model_fingerprint",
    "data_fingerprint",
)
ENVIRONMENT_FIELDS = ("platform", "versions", "code")


@dataclass(frozen=True)
class Tuning:
    """How hyper-parameters were chosen on the private data.

    ``method``: "none" (nobody said), "composition" (``ledgers`` of the other runs are added up) or
    "papernot_steinke" (K runs, K drawn before looking with mean ``mean_runs`` and shape ``eta``).
    """

    method: str = "none"
    ledgers: tuple[PathLike, ...] = ()
    mean_runs: float = 1.0
    eta: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in ("none", "composition", "papernot_steinke"):
            raise ValueError(f"method is {self.method!r}; it must be 'none', 'composition' or 'papernot_steinke'")
        if (self.method == "composition") != bool(self.ledgers):
            raise ValueError("ledgers of the tuning runs go with method='composition', and only with it")


@dataclass
class Facts:
    """A report's content. ``to_dict`` is JSON-able and is what ``--format json`` writes."""

    delta: float
    max_epsilon: float | None
    verifications: list[Verification]
    epsilons: dict[str, float]
    epsilon: float
    """The headline: by the runs' own accountant, everything composed, tuning included."""
    epsilon_without_tuning: float
    trajectory: list[tuple[int, float]]
    deltas: list[float]
    epsilon_of_delta: dict[str, list[float]]
    sharpest: str
    """The accountant behind ``attack`` and ``groups``."""
    attack: list[tuple[float, float]]
    belief: float
    groups: list[tuple[int, float]]
    public: dict[str, list[tuple[int, float]]]
    tuning: Tuning
    utility: list[dict[str, Any]]
    audit: dict[str, Any] | None
    title: str
    generated: str = field(default_factory=lambda: datetime.datetime.now().astimezone().isoformat(timespec="seconds"))

    @property
    def accountant(self) -> str:
        return self.verifications[-1].accountant

    @property
    def relation(self) -> str:
        relations = {
            run.header["relation"] for v in self.verifications for run in v.contents.runs if run.header["relation"]
        }
        if relations == {"add_or_remove_one", "zero_out"}:
            return "zero_out"
        return relations.pop() if len(relations) == 1 else "mixed"

    @property
    def unit(self) -> str:
        return str(self.verifications[-1].contents.runs[-1].header["unit"])

    @property
    def verified(self) -> bool:
        return all(v.ok for v in self.verifications)

    @property
    def within_limit(self) -> bool | None:
        return None if self.max_epsilon is None else self.epsilon <= self.max_epsilon

    @property
    def seeded(self) -> bool:
        return any(seeded(run) for v in self.verifications for run in v.contents.runs)

    @property
    def steps(self) -> int:
        return sum(v.contents.steps for v in self.verifications)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": "paddle_privacy.report/1",
            "paddle_privacy": __version__,
            "generated": self.generated,
            "title": self.title,
            "unit": self.unit,
            "relation": self.relation,
            "delta": self.delta,
            "epsilon": plain(self.epsilon),
            "epsilon_without_tuning": plain(self.epsilon_without_tuning),
            "accountant": self.accountant,
            "max_epsilon": self.max_epsilon,
            "within_limit": self.within_limit,
            "verified": self.verified,
            "seeded_noise": self.seeded,
            "steps": self.steps,
            "epsilon_by_accountant": {name: plain(value) for name, value in self.epsilons.items()},
            "epsilon_against_step": [[step, plain(value)] for step, value in self.trajectory],
            "deltas": self.deltas,
            "epsilon_against_delta": {n: [plain(v) for v in values] for n, values in self.epsilon_of_delta.items()},
            "attack_and_group_limits_by": self.sharpest,
            "max_true_positive_rate": [
                {"false_positive_rate": rate, "true_positive_rate": hit} for rate, hit in self.attack
            ],
            "posterior_belief_from_half": self.belief,
            "group_epsilon": [{"rows": size, "epsilon": plain(value)} for size, value in self.groups],
            "public_statistics": {name: [list(point) for point in points] for name, points in self.public.items()},
            "tuning": {
                "method": self.tuning.method,
                "runs_composed": len(self.tuning.ledgers),
                "mean_runs": self.tuning.mean_runs,
                "eta": self.tuning.eta,
            },
            "utility": self.utility,
            "audit": self.audit,
            "ledgers": [describe_ledger(v) for v in self.verifications],
        }


def plain(value: float) -> float | str | None:
    """JSON without infinities."""
    if math.isnan(value):
        return None
    return "inf" if math.isinf(value) else value


def describe_ledger(verification: Verification) -> dict[str, Any]:
    contents = verification.contents
    interval = verification.interval
    return {
        "name": os.path.basename(contents.path),
        "ledger_id": contents.ledger_id,
        "receipt": contents.receipt,
        "records": contents.records,
        "recorded_epsilon": plain(verification.recorded),
        "recomputed_epsilon": plain(verification.recomputed),
        "independent_interval": None if interval is None else [plain(interval.low), plain(interval.high)],
        "independent_interval_is_two_sided": None if interval is None else interval.tight,
        "problems": [{"line": p.line, "problem": text("en", p.code, **p.values)} for p in verification.problems],
        "notes": [text("en", note.code, **note.values) for note in verification.notes],
        "runs": [
            {
                "steps": run.steps,
                "started": _time(run.started),
                "ended": _time(run.ended),
                "closed": run.closed,
                "declared_sampling": bool(run.header.get("sampling_declared_by_user")),
                "header": {name: run.header[name] for name in HEADER_FIELDS if run.header.get(name) is not None},
                "environment": {
                    name: run.header[name] for name in ("platform", "versions", "code") if name in run.header
                },
            }
            for run in contents.runs
        ],
    }


def collect(
    ledgers: Sequence[PathLike],
    delta: float | None = None,
    max_epsilon: float | None = None,
    tuning: Tuning | None = None,
    utility: Sequence[dict[str, Any]] = (),
    audit: dict[str, Any] | None = None,
    title: str = "",
) -> Facts:
    """Verifies the ledgers, composes them, and works out everything a report says.

    Args:
        ledgers: one or more ledgers about the same data.
        delta: δ of the total; the last run's by default.
        max_epsilon: the limit to compare with.
        tuning: how hyper-parameters were chosen.
        utility: rows such as ``{"metric": "accuracy", "private": 0.83, "baseline": 0.91}``.
        audit: a result of :mod:`paddle_privacy.audit` as a dict.

    Raises:
        BrokenLedger, LedgerError: a ledger does not verify, two of them are the same, or they cannot be composed.
        ValueError: no δ is known.
    """
    tuning = tuning or Tuning()
    if not ledgers:
        raise ValueError("ledgers is empty; name at least one")
    own = [verify_ledger(path, delta=delta) for path in ledgers]
    others = [verify_ledger(path, delta=delta) for path in tuning.ledgers]
    _refuse_twins(own + others)
    if delta is None:
        delta = own[-1].delta
    if delta is None:
        raise ValueError("delta is not known: the ledger's runs were given none, so pass one")
    name = own[-1].accountant
    mine, everything = [v.contents for v in own], [v.contents for v in own + others]
    without = max(total_epsilon(mine, delta, name), *(v.epsilon for v in own if v.delta == delta), 0.0)
    total = _with_tuning(everything, mine, delta, name, without, tuning)
    epsilons, curves = {}, {}
    deltas = [10.0**exponent for exponent in range(-10, -2)]
    for accountant in ACCOUNTANTS:
        try:
            composed = _composed(everything, accountant)
            epsilons[accountant] = composed.get_epsilon(delta)
            curves[accountant] = [composed.get_epsilon(d) for d in deltas]
        except (ValueError, UnsupportedEvent):
            continue
    sharpest = min(epsilons, key=lambda accountant: epsilons[accountant])
    tightest = _composed(everything, sharpest)
    hits = max_true_positive_rate(tightest, FALSE_POSITIVE_RATES)
    return Facts(
        delta=delta,
        max_epsilon=max_epsilon,
        verifications=own + others,
        epsilons=epsilons,
        epsilon=total,
        epsilon_without_tuning=without,
        trajectory=_trajectory(mine),
        deltas=deltas,
        epsilon_of_delta=curves,
        sharpest=sharpest,
        attack=[(rate, float(hit)) for rate, hit in zip(FALSE_POSITIVE_RATES, hits)],
        belief=posterior_belief(total),
        groups=[(size, tightest.get_epsilon(delta, size)) for size in GROUP_SIZES],
        public=_public(mine),
        tuning=tuning,
        utility=list(utility),
        audit=audit,
        title=title,
    )


def _composed(ledgers: list[LedgerContents], accountant: str) -> Any:
    total = get_accountant(accountant)
    for contents in ledgers:
        for event, count in contents.spent:
            total.compose(Event.from_dict(event), count)
    return total


def _with_tuning(
    everything: list[LedgerContents],
    mine: list[LedgerContents],
    delta: float,
    name: str,
    without: float,
    tuning: Tuning,
) -> float:
    if tuning.method == "composition":
        return max(without, total_epsilon(everything, delta, name))
    if tuning.method == "papernot_steinke":
        one_run = _composed(mine, "rdp")
        assert isinstance(one_run, RDPAccountant)
        return max(without, random_search_epsilon(one_run, delta, tuning.mean_runs, tuning.eta))
    return without


def _refuse_twins(verifications: list[Verification]) -> None:
    seen: dict[str, str] = {}
    for verification in verifications:
        contents = verification.contents
        if contents.ledger_id in seen:
            raise LedgerError(
                f"{contents.path} and {seen[contents.ledger_id]} are copies of one ledger; name only the longer one"
            )
        seen[contents.ledger_id] = contents.path


def _trajectory(ledgers: list[LedgerContents]) -> list[tuple[int, float]]:
    """Recorded ε against the number of steps; several ledgers are laid end to end without adding their ε."""
    points, offset = [], 0
    for contents in ledgers:
        for run in contents.runs:
            stride = max(1, run.steps // CURVE_POINTS)
            for index in [*range(0, run.steps - 1, stride), *([run.steps - 1] if run.steps else [])]:
                if not math.isnan(run.epsilon[index]):
                    points.append((offset + index + 1, run.epsilon[index]))
            offset += run.steps
    return points


def _public(ledgers: list[LedgerContents]) -> dict[str, list[tuple[int, float]]]:
    """Numeric series that the runs declared public."""
    series: dict[str, list[tuple[int, float]]] = {}
    offset = 0
    for contents in ledgers:
        for run in contents.runs:
            for name, values in run.public.items():
                numbers = [(offset + i + 1, float(v)) for i, v in values if isinstance(v, (int, float))]
                stride = max(1, len(numbers) // CURVE_POINTS)
                series.setdefault(name, []).extend(numbers[::stride])
            offset += run.steps
    return {name: points for name, points in series.items() if points}


def _time(seconds: float) -> str | None:
    if math.isnan(seconds):
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")
