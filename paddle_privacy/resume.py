"""What a ledger knows beyond a saved account: steps whose weights were lost and whose spend was not."""

from __future__ import annotations

import json
from typing import Any

from paddle_privacy.accounting.events import Event
from paddle_privacy.errors import LedgerError, PrivacyError
from paddle_privacy.verify.chain import read_head, read_ledger


def continue_account(optimizer: Any) -> None:
    """Composes what the optimizer's ledger already holds, before its first step: earlier runs saw the same people."""
    for event, count in steps_beyond("0" if optimizer._ledger is not None else None, optimizer):
        optimizer.spending.accountant.compose(event, count)


def ledger_receipt(optimizer: Any) -> str | None:
    """How far the optimizer's ledger has got: "<records>:<hash>", "0" before it exists, None without one."""
    ledger = getattr(optimizer, "_ledger", None)
    if ledger is None:
        return None
    if ledger.is_open:
        return ledger.receipt
    return read_ledger(ledger.path).receipt if ledger.path.exists() else "0"


def steps_beyond(receipt: str | None, optimizer: Any) -> list[tuple[Event, int]]:
    """Steps that the ledger holds and an account saved at `receipt` does not; nothing for an account without a ledger.

    Raises:
        PrivacyError: the account's ledger is missing, or damaged.
    """
    ledger = getattr(optimizer, "_ledger", None)
    if receipt is None:
        return []
    if ledger is None:
        raise PrivacyError(
            "the checkpoint's run kept a privacy ledger, which knows of steps taken after the checkpoint; build the "
            "optimizer with ledger= and its path"
        )
    if not ledger.path.exists():
        if receipt == "0":
            return []
        raise PrivacyError(f"the ledger {ledger.path} of the checkpoint's run is missing; restore it")
    try:
        contents = read_ledger(ledger.path, receipt=None if receipt == "0" else receipt)
    except LedgerError:
        head = read_head(ledger.path)
        if receipt == "0" and head is not None and head.records == 0:
            return []  # killed between making the ledger's files and its first record
        raise
    known = int(receipt.partition(":")[0])
    lost = []
    with open(ledger.path, "rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break  # torn, never acknowledged: no update followed
            record = json.loads(line)
            if record["kind"] == "step" and record["n"] >= known:
                lost.append((Event.from_dict(contents.events[record["event_id"]]), 1))
    return lost
