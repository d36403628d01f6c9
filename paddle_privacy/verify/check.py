"""Does a ledger say the truth? Chain first, then ε from the events, by two independent routes.

1. The accountant that the run used composes the events again: the recorded ε must not be smaller.
2. :mod:`paddle_privacy.verify.losses` computes, without any accountant, an ε that no correct claim can be below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..accounting import Event, get_accountant
from ..errors import LedgerError
from .chain import LedgerContents, PathLike, Run, read_ledger
from .losses import LossInterval, Part, epsilon_interval, parts_of

CHECKPOINTS = 4
"""Besides the last step of each run, ε is recomputed at this many steps in between."""

_ROUNDING = 1e-6


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
    problems: list[tuple[int, str]] = field(default_factory=list)
    """(line, what is wrong); the ledger must not be relied on."""
    notes: list[str] = field(default_factory=list)
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
        result.problems.append(
            (contents.records, f"recorded ε = {recorded:.6g}, the {name} accountant gives {recomputed:.6g}")
        )
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
    counts = dict(before)
    for number in run.event_ids[: index + 1]:
        counts[number] = counts.get(number, 0) + 1
    spent = [(contents.events[number], count) for number, count in counts.items()]
    floor = epsilon_interval(_parts(spent), run.header["delta"]).low
    return floor if recorded < floor * (1 - _ROUNDING) - _ROUNDING else 0.0


def _first_passed(contents: LedgerContents, before: dict[int, int], run: Run, good: int, bad: int) -> tuple[int, str]:
    """(line, message) of the earliest bad step between a good and a bad one."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if _limit_passed(contents, before, run, middle) else (middle, bad)
    floor = _limit_passed(contents, before, run, bad)
    return (
        run.first_line + 1 + bad,
        f"recorded ε = {run.epsilon[bad]:.6g} at step {run.step[bad]}, but these events cannot cost less than "
        f"{floor:.6g}",
    )


def seeded(run: Run) -> bool:
    """Whether the run said that its noise came from a seed, which makes it reproducible and therefore removable."""
    noise = run.header.get("noise")
    return isinstance(noise, dict) and noise.get("secure") is False


def _remark(result: Verification) -> None:
    contents = result.contents
    if contents.torn_bytes:
        result.notes.append(
            f"the last line is unfinished ({contents.torn_bytes} bytes): the run died while writing it; its step was "
            "never taken"
        )
    elif not contents.runs[-1].closed:
        result.notes.append("the last run is not closed: it is still training, or it was interrupted")
    if contents.head is None:
        result.notes.append("there is no head file, so records cut off from the end would not be noticed")
    for number, run in enumerate(contents.runs):
        if seeded(run):
            result.notes.append(f"run {number} drew its noise from a seed; whoever knows it can remove the noise")
        if run.header.get("sampling_declared_by_user"):
            result.notes.append(f"run {number}: the sampling is the user's word; the loader was not seen to do it")
        if run.header.get("delta") is None and run.steps:
            result.notes.append(f"run {number} recorded no ε, because it was given no δ")
    if result.interval is not None and not result.interval.tight:
        result.notes.append("the independent method knows only a lower limit for this kind of sampling")
