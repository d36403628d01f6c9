"""The privacy ledger: what each step spent, on disk before the step happens.

:meth:`Ledger.append` returns only when the record is durable, and the optimizer calls it before a noisy update
touches the weights. A crash can therefore leave a record without its update (ε over-reported by one step), never
an update without its record. File format and tamper evidence: :mod:`paddle_privacy.verify.chain`.

Everything in a ledger becomes as public as the ledger. Statistics of the raw gradients or the realised batch size
are not covered by ε; :meth:`Ledger.append` takes them only when the header declares them public.
"""

from __future__ import annotations

import atexit
import hashlib
import hmac
import json
import math
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import LedgerError
from .verify.chain import (
    FORMAT,
    GENESIS,
    Head,
    LedgerContents,
    PathLike,
    head_path,
    read_head,
    read_ledger,
    seal,
)
from .version import __version__

REQUIRED_HEADER = (
    "relation",
    "unit",
    "dataset_size",
    "batch_size",
    "sampling",
    "noise_multiplier",
    "clip_norm",
    "clipping",
    "noise",
    "accountant",
    "delta",
)
"""Keys every header must have; a value may be None where the run does not know it."""

COVERED_BY_EPSILON = frozenset({"clip_norm", "noise_multiplier", "learning_rate", "noised_clip_fraction"})
"""Extra fields of a step that reveal nothing beyond the mechanism itself."""

_SAME_DATASET = ("unit", "dataset_size", "data_fingerprint")
_RESERVED = frozenset({"kind", "n", "step", "event", "event_id", "epsilon", "time", "hash"})


def environment() -> dict[str, Any]:
    """Versions of what computed the run, and the git commit of the working directory if it is a repository."""
    import numpy
    import scipy

    versions = {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "paddle_privacy": __version__,
    }
    paddle = sys.modules.get("paddle")
    if paddle is not None:
        versions["paddle"] = paddle.__version__
        versions["paddle_commit"] = getattr(paddle.version, "commit", "unknown")
    return {"platform": platform.platform(), "versions": versions, "code": _git_state()}


def _git_state() -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None outside a repository or without git."""

    def git(*arguments: str) -> str:
        completed = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True)
        return completed.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


class Ledger:
    """An append-only, hash-chained record of privacy spent; one writer at a time.

    Args:
        path: a JSON Lines file; ``<path>.head`` appears beside it and belongs to it.
        header: what the owner of the data adds to every run's header, such as ``data_fingerprint`` (see
            :func:`file_fingerprint`) or ``public_fields``; it cannot replace what the optimizer says about itself.

    ``open`` creates the ledger or continues it; several runs on one dataset share one ledger, and
    :attr:`spent` tells the accountant where to start from.

    =====================================  ==================================================================
    what happens                           outcome
    =====================================  ==================================================================
    the process dies between two records   next ``open`` continues
    it dies inside a write                 the torn line was never acknowledged; ``open`` drops and records it
    a line was edited, moved or removed    ``open`` raises ``BrokenLedger`` with the line
    the tail was cut off                   ``open`` raises, because the head file knows better
    another process holds the ledger       ``open`` raises ``LedgerError``
    the disk is full                       ``append`` raises ``LedgerError``; every later ``append`` too
    the writer forks                       ``append`` in the child raises ``LedgerError``
    =====================================  ==================================================================
    """

    def __init__(self, path: PathLike, header: dict[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._extra_header = dict(header or {})
        self._fd = -1
        self._head_fd = -1
        self._pid = -1
        self._failed = ""
        self._hash = GENESIS
        self._records = 0
        self._size = 0
        self._event_ids: dict[str, int] = {}
        self._public: frozenset[str] = frozenset()
        self._run_steps = 0
        self._last_epsilon = -math.inf
        self._ledger_id = ""
        self._runs = 0
        self._spent: list[tuple[dict[str, Any], int]] = []

    @property
    def spent(self) -> list[tuple[dict[str, Any], int]]:
        """``[(event as a dict, times)]`` of all runs before this one; the accountant composes them first."""
        return [(dict(event), count) for event, count in self._spent]

    @property
    def ledger_id(self) -> str:
        """Random name of this ledger; the same in every run that continues it."""
        return self._ledger_id

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    @property
    def receipt(self) -> str:
        """``<records>:<hash>`` of the last durable record, for ``paddle-privacy verify --receipt``."""
        return f"{self._records}:{self._hash}"

    def open(self, header: dict[str, Any]) -> Ledger:
        """Creates the ledger, or continues it, and writes the run's header durably.

        Args:
            header: JSON-able; must hold the keys of :data:`REQUIRED_HEADER`. ``public_fields`` lists the names of
                further per-step fields that the run declares public.

        Raises:
            ValueError: a header key is missing or not JSON-able.
            LedgerError: in use elsewhere, damaged, or begun on another dataset or relation.
        """
        missing = [name for name in REQUIRED_HEADER if name not in header]
        if missing:
            raise ValueError(f"header lacks {', '.join(missing)}; pass None for what the run does not know")
        try:
            header = json.loads(json.dumps({**self._extra_header, **header}, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"header must be plain JSON without NaN or infinity: {error}") from error
        if self.is_open:
            raise LedgerError(f"ledger {self.path} is already open; close it before opening it again")
        try:
            self._acquire()
            recovered = self._continue(header)
            self._write_run(header, recovered)
        except BaseException:
            self._release()
            raise
        # A process that ends without close() has still ended its run in order; kill -9 leaves the run open.
        atexit.register(self.close)
        return self

    def _acquire(self) -> None:
        """Opens both files and takes the lock; the head exists before the first record ever does."""
        try:
            import fcntl
        except ImportError as error:
            raise LedgerError("a ledger needs POSIX file locks (Linux or macOS) to keep a second writer out") from error
        head = read_head(self.path)
        create = os.O_CREAT if head is None or head.records == 0 else 0
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | create, 0o644)
        except FileNotFoundError as error:
            why = f"its head file knows of {head.records} records" if head else "the directory does not exist"
            raise LedgerError(f"ledger {self.path} is gone: {why}; restore it, or use another path") from error
        except OSError as error:
            raise LedgerError(f"ledger {self.path} cannot be opened for writing: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LedgerError(
                f"ledger {self.path} is in use by another run; wait for it to end, or give this run its own ledger"
            ) from error
        self._pid = os.getpid()
        fresh = os.fstat(self._fd).st_size == 0
        if fresh and read_head(self.path) is None:
            self._head_fd = os.open(head_path(self.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._write_head()
            os.fsync(self._head_fd)
            _sync_directory(self.path.parent)
        elif head_path(self.path).exists():
            self._head_fd = os.open(head_path(self.path), os.O_RDWR | os.O_CLOEXEC)

    def _continue(self, header: dict[str, Any]) -> int:
        """Takes over what earlier runs left; returns the bytes of a torn last line that were dropped."""
        head = read_head(self.path)
        never_begun = head is not None and head.records == 0 and b"\n" not in self.path.read_bytes()[:65536]
        if never_begun:
            torn = os.fstat(self._fd).st_size
            self._ledger_id = secrets.token_hex(8)
            self._hash, self._records, self._size, self._runs = GENESIS, 0, 0, 0
            self._event_ids, self._spent = {}, []
        else:
            contents = read_ledger(self.path)
            self._check_same_dataset(contents, header)
            torn = contents.torn_bytes
            self._ledger_id = contents.ledger_id
            self._hash, self._records, self._size = contents.hash, contents.records, contents.size
            self._runs = len(contents.runs)
            self._event_ids = {_canonical(event): number for number, event in enumerate(contents.events)}
            self._spent = contents.spent
        if torn:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
        return torn

    def _check_same_dataset(self, contents: LedgerContents, header: dict[str, Any]) -> None:
        for run, earlier in enumerate(contents.runs):
            for name in ("relation", *_SAME_DATASET):
                before, now = earlier.header.get(name), header.get(name)
                # A guarantee for adding or removing a row also holds for zeroing it out, so these two may mix.
                if name == "relation" and {before, now} <= {"add_or_remove_one", "zero_out"}:
                    continue
                if before is not None and now is not None and before != now:
                    raise LedgerError(
                        f"ledger {self.path} was begun with {name}={before!r} (run {run}), this run has {now!r}; "
                        "one ledger is about one dataset under one relation, so use a new ledger"
                    )

    def _write_run(self, header: dict[str, Any], recovered: int) -> None:
        self._failed = ""
        self._public = COVERED_BY_EPSILON | frozenset(header.get("public_fields") or ())
        self._run_steps, self._last_epsilon = 0, -math.inf
        self._write(
            {
                "kind": "run",
                "n": self._records,
                "format": FORMAT,
                "ledger_id": self._ledger_id,
                "run": self._runs,
                "time": _now(),
                "recovered_torn_bytes": recovered,
                "header": header,
            }
        )

    def append(self, event: dict[str, Any], epsilon: float | None, step: int, **extra: Any) -> None:
        """Records one noisy step; returns once the record is durable. Call it before the update.

        Args:
            event: ``Event.to_dict()`` of what this step does to the data.
            epsilon: cumulative ε after this step at the header's ``delta``, earlier runs of this ledger
                included; ``inf`` where there is no bound, None where it was not computed. Spent budget does not
                come back, so a value below the last one (an accountant's rounding) is recorded as the last one.
            step: the optimizer's number of this step.
            extra: what else to keep: names in :data:`COVERED_BY_EPSILON`, or in the header's ``public_fields``.

        Raises:
            ValueError: an extra that the header does not declare public, or a negative or NaN ε.
            LedgerError: closed, forked, or the record could not be made durable.
        """
        self._check_writable()
        undeclared = [name for name in extra if name not in self._public or name in _RESERVED]
        if undeclared:
            raise ValueError(
                f"{', '.join(undeclared)} would become public with the ledger and is not covered by ε; "
                "name it in the header's public_fields if it may be published"
            )
        if epsilon is not None:
            if not epsilon >= 0:
                raise ValueError(f"epsilon is {epsilon}; it must be >= 0, inf, or None")
            epsilon = max(float(epsilon), self._last_epsilon)
        key = _canonical(event)
        record: dict[str, Any] = {"kind": "step", "n": self._records, "step": int(step)}
        number = self._event_ids.get(key)
        if number is None:
            record["event_id"], record["event"] = len(self._event_ids), event
        else:
            record["event_id"] = number
        record["epsilon"] = "inf" if epsilon is not None and math.isinf(epsilon) else epsilon
        record["time"] = _now()
        record.update(extra)
        self._write(record)
        self._event_ids.setdefault(key, len(self._event_ids))
        self._run_steps += 1
        if epsilon is not None:
            self._last_epsilon = epsilon

    def close(self) -> None:
        """Writes the closing record and gives the lock back; a closed ledger can be opened again."""
        if not self.is_open:
            return
        try:
            if not self._failed and self._pid == os.getpid():
                record = {"kind": "close", "n": self._records, "steps": self._run_steps, "time": _now()}
                self._write(record)
                os.fsync(self._head_fd)
        finally:
            atexit.unregister(self.close)
            self._release()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_writable(self) -> None:
        if not self.is_open:
            raise LedgerError(f"ledger {self.path} is not open; call open(header) first")
        if self._pid != os.getpid():
            raise LedgerError(f"ledger {self.path} belongs to process {self._pid}; a forked child must not write to it")
        if self._failed:
            raise LedgerError(f"ledger {self.path} could not be written earlier ({self._failed}); training must stop")

    def _write(self, record: dict[str, Any]) -> None:
        """One record, durable before return; then the head, which may lag after a power cut but never leads."""
        self._check_writable()
        try:
            line, digest = seal(self._hash, record)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the ledger record is not plain JSON without NaN or infinity: {error}") from error
        try:
            written = os.pwrite(self._fd, line, self._size)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
            _sync(self._fd)
        except OSError as error:
            self._failed = str(error)
            raise LedgerError(
                f"ledger {self.path} could not be made durable ({error}); the step must not happen"
            ) from error
        self._hash, self._records, self._size = digest, self._records + 1, self._size + len(line)
        self._write_head()

    def _write_head(self) -> None:
        os.pwrite(self._head_fd, Head(self._records, self._size, self._hash).to_bytes(), 0)

    def _release(self) -> None:
        for descriptor in (self._head_fd, self._fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._head_fd = -1


def _now() -> float:
    return round(time.time(), 3)


def _canonical(event: dict[str, Any]) -> str:
    return json.dumps(event, sort_keys=True, allow_nan=False)


def _sync(descriptor: int) -> None:
    """Data and size on the device. macOS has no fdatasync, and its fsync stops at the drive's cache."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(descriptor)


def _sync_directory(directory: Path) -> None:
    """The file's name, too, must survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parameter_fingerprint(parameters: Iterable[Any]) -> str:
    """SHA-256 over shape and dtype of parameters, in no particular order: which model a run was about, no weights.

    Names are left out, since the same model has other names inside a wrapper.
    """
    lines = sorted(f"{list(parameter.shape)} {parameter.dtype}" for parameter in parameters)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def file_fingerprint(paths: Iterable[PathLike], key: bytes = b"") -> str:
    """SHA-256 (HMAC with ``key``) over the contents of data files in order, for a header's ``data_fingerprint``.

    A fingerprint confirms a correct guess of the whole data set to anyone who sees the ledger. Where that matters, give
    a secret ``key`` and keep it with the data.
    """
    digest = hmac.new(key, digestmod="sha256")
    for path in paths:
        with open(path, "rb") as stream:
            content = hashlib.sha256()
            for block in iter(lambda: stream.read(1 << 20), b""):
                content.update(block)
        digest.update(content.digest())
    return digest.hexdigest()
