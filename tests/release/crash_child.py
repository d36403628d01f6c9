"""Run by test_crash.py: forks writers and kills each at a random point, then reads what is left.

Each writer does what an optimizer does: record the step, then change the weights (here: one byte more in a file).
Usage: python crash_child.py DIRECTORY KILLS SEED
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

from paddle_privacy.errors import LedgerError
from paddle_privacy.ledger import REQUIRED_HEADER, Ledger
from paddle_privacy.verify.chain import read_ledger

EVENT = {"event": "Gaussian", "noise_multiplier": 1.0}
RUNS_PER_LEDGER = 10


def write_until_killed(ledger_path: str, updates: int) -> None:
    header = dict.fromkeys(REQUIRED_HEADER, None)
    header.update(relation="add_or_remove_one", unit="row", delta=1e-5)
    ledger = Ledger(ledger_path).open(header)
    step = sum(count for _, count in ledger.spent)
    give_up = time.monotonic() + 5  # so that an interrupted test leaves no endless writer behind
    while time.monotonic() < give_up:
        step += 1
        ledger.append(EVENT, 0.01 * step, step)
        os.write(updates, b"u")
    os._exit(1)


def wait_for_a_random_point(draw: random.Random, updates: str) -> None:
    """Every fifth time while the ledger is being opened, else after some updates and a part of the next one."""
    if draw.random() < 0.2:
        time.sleep(draw.uniform(0.0, 0.01))
        return
    target = os.path.getsize(updates) + draw.randint(1, 30)
    give_up = time.monotonic() + 4
    while os.path.getsize(updates) < target and time.monotonic() < give_up:
        time.sleep(1e-4)
    time.sleep(draw.uniform(0.0, 0.002))


def main(directory: str, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    for kill in range(kills):
        base = os.path.join(directory, f"ledger{kill // RUNS_PER_LEDGER}.jsonl")
        updates = os.open(base + ".updates", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        child = os.fork()
        if child == 0:
            write_until_killed(base, updates)
        os.close(updates)
        wait_for_a_random_point(draw, base + ".updates")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        made = os.path.getsize(base + ".updates")
        try:
            contents = read_ledger(base)
            outcome = {"steps": contents.steps, "runs": len(contents.runs)}
        except LedgerError as error:
            outcome = {"steps": 0, "runs": 0, "problem": str(error)}
        print(json.dumps({"kill": kill, "updates": made, **outcome}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
