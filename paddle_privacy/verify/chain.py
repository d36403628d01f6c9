"""The ledger's file format, and the walk that checks it record by record.

A ledger is JSON Lines. Every line ends in ``,"hash":"<64 hex>"}`` and the hash is
SHA-256(previous line's hash ‖ everything on this line before ``,"hash"``), starting from
:data:`GENESIS`. The hash covers the bytes as written, so there is no canonical form to argue about.

A chain cannot see its own tail being cut off. ``<ledger>.head`` holds the number of records, the size and
the last hash, and is written after each record. An adversary who can rewrite both files can
rewrite history; against that, keep a receipt (:attr:`LedgerContents.receipt`) where they cannot reach.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

from ..errors import LedgerError

FORMAT = "paddle_privacy.ledger/1"
GENESIS = hashlib.sha256(FORMAT.encode()).hexdigest()
HASH_FIELD = b',"hash":"'
HASH_TAIL = len(HASH_FIELD) + 64 + len(b'"}')
HEAD_SIZE = 256
PathLike = Union[str, "os.PathLike[str]"]


class BrokenLedger(LedgerError):
    """The ledger is not what its writer left. ``line`` is the first bad line, counted from 1 (0: the head file)."""

    def __init__(self, path: PathLike, line: int, problem: str) -> None:
        self.path, self.line, self.problem = str(path), line, problem
        where = f"line {line}" if line else "head file"
        super().__init__(f"ledger {path}, {where}: {problem}")


def seal(previous_hash: str, record: dict[str, Any]) -> tuple[bytes, str]:
    """One line of the ledger, newline included, and its hash."""
    body = json.dumps(record, separators=(",", ":"), allow_nan=False)[:-1].encode()
    digest = hashlib.sha256(previous_hash.encode() + body).hexdigest()
    return body + HASH_FIELD + digest.encode() + b'"}\n', digest


@dataclass(frozen=True)
class Head:
    """What the head file says about the ledger: how many records, how many bytes, the last record's hash."""

    records: int
    size: int
    hash: str

    def to_bytes(self) -> bytes:
        """Always :data:`HEAD_SIZE` bytes, so that one small write replaces it whole."""
        text = json.dumps({"records": self.records, "bytes": self.size, "hash": self.hash}, separators=(",", ":"))
        return text.encode().ljust(HEAD_SIZE - 1) + b"\n"


def head_path(path: PathLike) -> Path:
    return Path(f"{os.fspath(path)}.head")


def read_head(path: PathLike) -> Head | None:
    """The head of the ledger at ``path``; None where there is no head file."""
    try:
        raw = head_path(path).read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields = json.loads(raw)
        head = Head(int(fields["records"]), int(fields["bytes"]), str(fields["hash"]))
        intact = len(raw) == HEAD_SIZE and head.to_bytes() == raw
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise BrokenLedger(path, 0, "is damaged; restore it from a backup together with the ledger")
    return head


def ledger_epsilon(value: Any) -> float:
    """JSON has no infinity: an ε without bound is written ``"inf"``, one that nobody computed ``null``."""
    if value == "inf":
        return math.inf
    return math.nan if value is None else float(value)


@dataclass
class Run:
    """One training run in a ledger: its header and what it spent."""

    header: dict[str, Any]
    started: float
    first_line: int
    events: dict[int, int] = field(default_factory=dict)
    """Steps taken under each event, by the event's number in :attr:`LedgerContents.events`."""
    epsilon: list[float] = field(default_factory=list)
    """Cumulative ε as recorded, a value a step (nan where it was not computed)."""
    event_ids: list[int] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    public: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)
    """What the run declared public and recorded with its steps: name -> [(index of the step in this run, value)]."""
    ended: float = math.nan
    closed: bool = False

    @property
    def steps(self) -> int:
        return len(self.epsilon)


@dataclass
class LedgerContents:
    """A ledger whose chain holds, from the first byte to the last record."""

    path: str
    ledger_id: str
    runs: list[Run]
    events: list[dict[str, Any]]
    records: int
    size: int
    hash: str
    torn_bytes: int
    """Bytes of an unfinished last line: a record that was never durable, so no update followed it."""
    head: Head | None

    @property
    def receipt(self) -> str:
        """``<records>:<hash>``; print it, sign it, mail it: nobody can shorten or edit the ledger behind it."""
        return f"{self.records}:{self.hash}"

    @property
    def steps(self) -> int:
        return sum(run.steps for run in self.runs)

    @property
    def spent(self) -> list[tuple[dict[str, Any], int]]:
        """Every event with the number of times it ran, over all runs of the ledger."""
        total: dict[int, int] = {}
        for run in self.runs:
            for number, count in run.events.items():
                total[number] = total.get(number, 0) + count
        return [(self.events[number], count) for number, count in total.items()]


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)
_STEP_FIELDS = {"kind", "n", "step", "event_id", "event", "epsilon", "time", "hash"}
_KINDS = ("run", "step", "close")


class _Walk:
    """State of a walk over the records: what must hold of each, given those before."""

    def __init__(self, path: PathLike) -> None:
        self.path = path
        self.runs: list[Run] = []
        self.events: list[dict[str, Any]] = []
        self.ledger_id = ""
        self.line = 0

    def broken(self, problem: str) -> BrokenLedger:
        return BrokenLedger(self.path, self.line, problem)

    def take(self, record: dict[str, Any]) -> None:
        if record["n"] != self.line - 1:
            raise self.broken(f"is numbered {record['n']}, expected {self.line - 1}")
        kind = record["kind"]
        if kind == "step":
            self._step(record)
        elif kind == "run":
            self._run(record)
        elif kind == "close":
            self._close(record)
        else:
            raise self.broken(f"has the unknown kind {kind!r}; known are {', '.join(_KINDS)}")

    def _run(self, record: dict[str, Any]) -> None:
        if record["format"] != FORMAT:
            raise self.broken(f"has format {record['format']!r}; this version reads {FORMAT!r}")
        if self.runs and record["ledger_id"] != self.ledger_id:
            raise self.broken("belongs to another ledger")
        if record["run"] != len(self.runs):
            raise self.broken(f"starts run {record['run']}, expected run {len(self.runs)}")
        self.ledger_id = record["ledger_id"]
        self.runs.append(Run(record["header"], record["time"], self.line))

    def _step(self, record: dict[str, Any]) -> None:
        if not self.runs:
            raise self.broken("is a step before any run header")
        run = self.runs[-1]
        if run.closed:
            raise self.broken("is a step after the run was closed")
        number = record["event_id"]
        if "event" in record:
            if number != len(self.events):
                raise self.broken(f"defines event {number}, expected {len(self.events)}")
            self.events.append(record["event"])
        elif not 0 <= number < len(self.events):
            raise self.broken(f"refers to event {number}, which no earlier line defines")
        epsilon = ledger_epsilon(record["epsilon"])
        if run.epsilon and epsilon < run.epsilon[-1]:
            raise self.broken(f"has ε = {epsilon}, less than the step before it ({run.epsilon[-1]})")
        index = len(run.epsilon)
        run.epsilon.append(epsilon)
        run.event_ids.append(number)
        run.step.append(record["step"])
        run.events[number] = run.events.get(number, 0) + 1
        run.ended = record["time"]
        if len(record) > (8 if "event" in record else 7):
            for name in record.keys() - _STEP_FIELDS:
                run.public.setdefault(name, []).append((index, record[name]))

    def _close(self, record: dict[str, Any]) -> None:
        if not self.runs or self.runs[-1].closed:
            raise self.broken("closes a run that is not open")
        if record["steps"] != self.runs[-1].steps:
            raise self.broken(f"closes the run after {record['steps']} steps; the ledger holds {self.runs[-1].steps}")
        self.runs[-1].closed = True
        self.runs[-1].ended = record["time"]


def read_ledger(path: PathLike, require_head: bool = True, receipt: str | None = None) -> LedgerContents:
    """Walks the whole ledger and returns what it holds, or raises at the first line that is not as it was written.

    Args:
        path: the ledger.
        require_head: a missing head file is an error, because a truncated ledger would pass without it.
        receipt: ``<records>:<hash>`` noted at an earlier time; the ledger must contain that very record.

    Raises:
        BrokenLedger: an edit, deletion, insertion, swap or truncation; ``.line`` names the first bad line.
        LedgerError: the file cannot be read, or the receipt is malformed.
    """
    try:
        stream = open(path, "rb")  # noqa: SIM115 - closed by the with below; only the open may say "cannot be read"
    except OSError as error:
        raise LedgerError(f"ledger {path} cannot be read: {error.strerror or error}") from error
    # The head before the records: a run that is still writing may then only be ahead of it.
    head = read_head(path)
    anchors = _anchors(path, head, require_head, receipt)
    walk = _Walk(path)
    previous, size, torn = GENESIS, 0, 0
    sha256, decode = hashlib.sha256, _DECODER.decode
    with stream:
        for line in stream:
            if not line.endswith(b"\n"):
                torn = len(line)
                break
            walk.line += 1
            body, tail = line[: -HASH_TAIL - 1], line[-HASH_TAIL - 1 :]
            digest = sha256(previous.encode() + body).hexdigest()
            if tail != HASH_FIELD + digest.encode() + b'"}\n':
                raise walk.broken("does not continue the hash chain: it, or a line next to it, was changed or removed")
            try:
                walk.take(decode(line.decode()))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise walk.broken(f"is not a ledger record ({type(error).__name__}: {error})") from error
            previous = digest
            size += len(line)
            if walk.line in anchors and anchors[walk.line] != digest:
                raise walk.broken("is not the record that the head file or the receipt names")
    _check_reach(walk, size, torn, head, anchors)
    return LedgerContents(str(path), walk.ledger_id, walk.runs, walk.events, walk.line, size, previous, torn, head)


def _anchors(path: PathLike, head: Head | None, require_head: bool, receipt: str | None) -> dict[int, str]:
    """Record number (from 1) -> the hash it must have."""
    anchors: dict[int, str] = {}
    if head is not None:
        anchors[head.records] = head.hash
    elif require_head:
        raise BrokenLedger(
            path,
            0,
            f"{head_path(path).name} is missing, so a truncation could not be seen; restore it beside the ledger",
        )
    if receipt is not None:
        count, _, digest = receipt.strip().partition(":")
        if not count.isdigit() or len(digest) != 64:
            raise LedgerError(f"receipt {receipt!r} is not <records>:<64 hex digits>")
        if anchors.get(int(count), digest) != digest:
            raise BrokenLedger(path, 0, f"disagrees with the receipt about record {count}")
        anchors[int(count)] = digest
    return anchors


def _check_reach(walk: _Walk, size: int, torn: int, head: Head | None, anchors: dict[int, str]) -> None:
    """The ledger must reach as far as every anchor, and must start with a run."""
    reach = max(anchors, default=0)
    if walk.line < reach:
        raise BrokenLedger(
            walk.path,
            walk.line + 1,
            f"is missing: the ledger was cut off after {walk.line} records, the head file or receipt knows of {reach}",
        )
    if head is not None and head.records == walk.line and head.size != size:
        raise BrokenLedger(walk.path, 0, f"says {head.size} bytes, the ledger's records take {size}")
    if not walk.runs:
        raise BrokenLedger(walk.path, 1, "is missing: the ledger holds no record" + (" but a torn one" if torn else ""))
