"""Does a ledger say the truth? Chain first, then ε from the events, by two independent routes.

1. The accountant that the run used composes the events again: the recorded ε must not be smaller.
2. :mod:`paddle_privacy.verify.losses` computes, without any accountant, an ε that no correct claim can be below.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..accounting import Event, get_accountant
from ..errors import LedgerError
from .chain import LedgerContents, PathLike, Run, read_ledger
from .losses import COARSE, LossInterval, Part, epsilon_interval, parts_of

CHECKPOINTS = 4
"""Besides the last step of each run, ε is recomputed at this many steps in between."""

_ROUNDING = 1e-6


@dataclass(frozen=True)
class Finding:
    """Something found. ``code`` names a sentence of :mod:`paddle_privacy.report.text`, ``values`` fill it in."""

    code: str
    values: dict[str, Any]
    line: int = 0
    """Line of the ledger, from 1; 0 where it is about the whole."""


@dataclass
class Verification:
    """What was checked, and what was found."""

    contents: LedgerContents
    delta: float | None
    recorded: float
    """Last recorded cumulative ε, at the run's own δ (nan where none was recorded)."""
    accountant: str
    recomputed: float
    """ε of all events at ``delta`` by the run's accountant (nan without δ)."""
    interval: LossInterval | None
    """Where the smallest possible ε lies, by the independent method."""
    steps_checked: int
    problems: list[Finding] = field(default_factory=list)
    """The ledger must not be relied on."""
    notes: list[Finding] = field(default_factory=list)
    """True but worth knowing."""

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def epsilon(self) -> float:
        """The ε to rely on at ``delta``: the largest of what the accountant and the independent method say."""
        floor = self.interval.low if self.interval is not None else 0.0
        return max(self.recomputed, floor)


def verify_ledger(
    path: PathLike, delta: float | None = None, receipt: str | None = None, require_head: bool = True
) -> Verification:
    """Reads, checks and recomputes a ledger.

    Args:
        path: the ledger.
        delta: δ of the total; the last run's own δ by default.
        receipt: ``<records>:<hash>`` noted earlier.
        require_head: whether a missing head file is an error.

    Raises:
        BrokenLedger: the hash chain does not hold; ``.line`` is the first bad line.
        LedgerError: the file cannot be read, or holds events that cannot be recomputed.
    """
    contents = read_ledger(path, require_head=require_head, receipt=receipt)
    last = contents.runs[-1].header
    if delta is None:
        delta = last.get("delta")
    name = str(last.get("accountant") or "rdp")
    recomputed, interval = math.nan, None
    if delta is not None:
        recomputed = total_epsilon([contents], delta, name)
        interval = epsilon_interval(_parts(contents.spent), delta)
    recorded = next((run.epsilon[-1] for run in reversed(contents.runs) if run.epsilon), 0.0)
    result = Verification(contents, delta, recorded, name, recomputed, interval, 0)
    _check_trajectory(result)
    if delta is not None and delta == last.get("delta") and recorded < recomputed * (1 - _ROUNDING) - _ROUNDING:
        values = {"recorded": f"{recorded:.6g}", "recomputed": f"{recomputed:.6g}", "accountant": name}
        result.problems.append(Finding("problem_accountant", values, contents.records))
    _remark(result)
    return result


def total_epsilon(ledgers: list[LedgerContents], delta: float, accountant: str, group_size: int = 1) -> float:
    """ε of everything in one or several ledgers on the same data, composed.

    Raises:
        LedgerError: an event that the accountant cannot read or bound.
    """
    total = get_accountant(accountant)
    for contents in ledgers:
        for event, count in contents.spent:
            try:
                total.compose(Event.from_dict(event), count)
            except (ValueError, TypeError, RuntimeError) as error:
                raise LedgerError(f"ledger {contents.path}: {error}") from error
    return total.get_epsilon(delta, group_size)


def _parts(spent: list[tuple[dict[str, Any], int]]) -> list[Part]:
    return [part for event, count in spent for part in parts_of(event, count)]


def _check_trajectory(result: Verification) -> None:
    """Recorded ε against the independent lower limit at chosen steps; the first bad one is found by bisection."""
    contents = result.contents
    before: dict[int, int] = {}
    for run in contents.runs:
        if run.header.get("delta") is not None and run.steps:
            good = -1
            spread = {run.steps * k // (CHECKPOINTS + 1) for k in range(1, CHECKPOINTS + 1)}
            for index in sorted(spread | {run.steps - 1}):
                result.steps_checked += 1
                if _limit_passed(contents, before, run, index):
                    result.problems.append(_first_passed(contents, before, run, good, index))
                    return
                good = index
        for number, count in run.events.items():
            before[number] = before.get(number, 0) + count


def _limit_passed(contents: LedgerContents, before: dict[int, int], run: Run, index: int) -> float:
    """The independent lower limit, where the ε recorded at this step of the run is below it; otherwise 0."""
    recorded = run.epsilon[index]
    if math.isnan(recorded):
        return 0.0
    counts = Counter(before) + Counter(run.event_ids[: index + 1])
    spent = [(contents.events[number], count) for number, count in counts.items()]
    floor = epsilon_interval(_parts(spent), run.header["delta"], COARSE).low
    return floor if recorded < floor * (1 - _ROUNDING) - _ROUNDING else 0.0


def _first_passed(contents: LedgerContents, before: dict[int, int], run: Run, good: int, bad: int) -> Finding:
    """The earliest bad step between a good and a bad one."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if _limit_passed(contents, before, run, middle) else (middle, bad)
    floor = _limit_passed(contents, before, run, bad)
    values = {"recorded": f"{run.epsilon[bad]:.6g}", "step": run.step[bad], "floor": f"{floor:.6g}"}
    return Finding("problem_limit", values, run.first_line + 1 + bad)


def seeded(run: Run) -> bool:
    """Whether the run said that its noise came from a seed, which makes it reproducible and therefore removable."""
    noise = run.header.get("noise")
    return isinstance(noise, dict) and noise.get("secure") is False


def _remark(result: Verification) -> None:
    contents = result.contents

    def note(code: str, **values: Any) -> None:
        result.notes.append(Finding(f"note_{code}", values))

    if contents.torn_bytes:
        note("torn", bytes=contents.torn_bytes)
    elif not contents.runs[-1].closed:
        note("open")
    if contents.head is None:
        note("no_head")
    for number, run in enumerate(contents.runs, start=1):
        if seeded(run):
            note("seeded", run=number)
        if run.header.get("sampling_declared_by_user"):
            note("declared", run=number)
        if run.header.get("delta") is None and run.steps:
            note("no_delta", run=number)
    if result.interval is not None and not result.interval.tight:
        note("one_sided")
