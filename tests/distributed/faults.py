"""Kills one rank of a run at every point of a step, and resumes each time with another number of ranks.

Twenty times with whole optimizer states, then with sharded ones, which resume from what the others saved.

``python faults.py <folder> [stall]``; run by test_faults.py. Each round writes ``<folder>/rounds.jsonl``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from launch import fork_ranks, wait
from paddle import nn
from paddle.io import DataLoader, TensorDataset

from paddle_privacy import PrivacyEngine, PrivacyError
from paddle_privacy.checkpoint import MANIFEST
from paddle_privacy.distributed.step import parameter_bytes_digest
from paddle_privacy.verify.chain import read_ledger

ROWS, BATCH, SIGMA = 60, 6, 1.0
POINTS = (
    "backward",  # before the ranks agree
    "agree",  # while they do
    "charge",  # after it
    "record",  # before the ledger's record
    "recorded",  # after it, before the others know
    "noise",
    "sum",  # before the all-reduce
    "summed",  # after it
    "update",
    "updated",
)
SHARDED_POINTS = (
    "noise",
    "sum",  # before the sums are added up on their owners
    "summed",
    "update",
    "updated",  # on this owner, and not sent
    "between",  # some of the new values are sent
    "shared",  # all of them
    "saving",
)
TIME_LIMIT = 25.0  # of a round; a peer that dies is noticed at once


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def meet_fate(optimizer: Any, point: str, at: int, fate: Any) -> None:
    """Arranges for `fate` at `point` of the step that follows `at` steps of this process."""
    shared, taken = optimizer._shared, [0]
    update = optimizer._update

    def counted(*args: Any, **kwargs: Any) -> None:
        if point == "update" and taken[0] == at:
            fate()
        update(*args, **kwargs)
        taken[0] += 1
        if point == "updated" and taken[0] == at:
            fate()

    optimizer._update = counted

    def around(owner: Any, name: str, before: str, after: str = "") -> None:
        method = getattr(owner, name)

        def fatal(*args: Any, **kwargs: Any) -> Any:
            if point == before and taken[0] == at:
                fate()
            result = method(*args, **kwargs)
            if point == after and taken[0] == at:
                fate()
            return result

        setattr(owner, name, fatal)

    around(optimizer._capture, "finish", "backward")
    around(shared, "agree", "agree")
    around(optimizer.spending, "charge", "charge")
    around(optimizer, "_append", "record", "recorded")
    around(optimizer.noise, "add_noise", "noise")
    around(shared.ranks, "sum_", "sum", "summed")
    around(shared.ranks, "sum_on_owners", "sum", "summed")
    around(shared.ranks, "from_owners", "", "shared")
    around(shared, "take_part_in_saving", "saving")
    if point == "between":
        broadcast, sent = dist.broadcast, [0]

        def counting(*args: Any, **kwargs: Any) -> Any:
            sent[0] += taken[0] == at
            if sent[0] == 2:
                fate()
            return broadcast(*args, **kwargs)

        dist.broadcast = counting


def train(folder: Path, place: Path, victim: int, point: str, at: int, fate: Any, limit: int, stage: int) -> None:
    dist.init_parallel_env()
    rank = dist.get_rank()
    rows = np.random.RandomState(0).randn(ROWS, 4).astype("float32")
    model = nn.Sequential(nn.Linear(4, 3))
    schedule = paddle.optimizer.lr.ExponentialDecay(0.1, 0.99)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=paddle.optimizer.Adam(schedule, parameters=model.parameters()),
        data_loader=DataLoader(TensorDataset([rows]), batch_size=BATCH, shuffle=True),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        ledger=folder / "ledger.jsonl",
        sharding_stage=stage,
    )
    saved = folder / "saved"
    if (saved / MANIFEST).exists():
        engine.load_checkpoint(path=saved, module=model)
    found: dict[str, Any] = {
        "steps at start": optimizer.spending.steps,
        "epsilon at start": engine.get_epsilon(1e-5),
        "updates": [],
        "weights at start": parameter_bytes_digest(list(model.parameters())),
        "error": "",
    }
    if rank == victim:
        meet_fate(optimizer, point, at, fate)
    taken = 0
    try:
        while taken < limit:
            for (x,) in loader:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.clear_grad()
                schedule.step()
                taken += 1
                found["updates"].append([optimizer.spending.steps, parameter_bytes_digest(list(model.parameters()))])
                if taken % 2 == 0:
                    engine.save_checkpoint(path=saved, module=model)
                if taken >= limit:
                    break
    except PrivacyError as error:
        found["error"] = str(error)
        found["weights at error"] = parameter_bytes_digest(list(model.parameters()))
        found["saves after"] = fails(lambda: engine.save_checkpoint(path=folder / "late", module=model))
    (place / f"rank{rank}.json").write_text(json.dumps(found))


def fails(run: Any) -> str:
    try:
        run()
    except PrivacyError as error:
        return str(error)
    return ""


def one_round(
    folder: Path, number: int, world: int, victim: int, point: str, at: int, fate: Any, limit: float, stage: int = 0
) -> dict:
    place = folder / f"round{number}"
    place.mkdir()
    began = time.monotonic()
    children = fork_ranks(world, lambda: train(folder, place, victim, point, at, fate, at + 4, stage), place)
    if fate is stop:
        survivors = [child for rank, child in enumerate(children) if rank != victim]
        codes = wait(survivors, limit)
        os.kill(children[victim], signal.SIGKILL)
        os.waitpid(children[victim], 0)
        codes.insert(victim, -9)
    else:
        codes = wait(children, limit)
    seconds = time.monotonic() - began
    files = {rank: place / f"rank{rank}.json" for rank in range(world)}
    found = {rank: json.loads(f.read_text()) for rank, f in files.items() if f.exists()}
    recorded = 0
    if (folder / "ledger.jsonl").exists():
        recorded = sum(count for _, count in read_ledger(folder / "ledger.jsonl").spent)
    logs = "" if len(found) + 1 >= world else "\n".join(f.read_text() for f in place.glob("*.log"))
    return {
        "world": world,
        "victim": victim,
        "point": point,
        "stage": stage,
        "at": at,
        "codes": codes,
        "seconds": seconds,
        "survivors": found,
        "recorded": recorded,
        "logs": logs[-3000:],
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    rounds = []
    if "stall" in sys.argv:
        rounds.append((2, 1, "sum", 1, stop, 100.0))
    else:
        for number in range(20):
            point = POINTS[number % len(POINTS)]
            world = 2 + (number // 2) % 2
            # Only rank 0 writes the ledger.
            victim = 0 if "record" in point else (number * 7 + number // 10) % world
            rounds.append((world, victim, point, 1 + number % 2, die, TIME_LIMIT))
        for number, point in enumerate(SHARDED_POINTS):
            # Rank 1 owns what is sent last; checkpoints are made after the second update.
            at = 2 if point == "saving" else 1 + number % 2
            victim = 1 if point == "between" else number % 2
            rounds.append((2 + number % 2, victim, point, at, die, TIME_LIMIT, 1 + number % 2))
    with open(folder / "rounds.jsonl", "w") as out:
        for number, arguments in enumerate(rounds):
            out.write(json.dumps(one_round(folder, number, *arguments)) + "\n")
            out.flush()
