"""What a step costs here: a few throwaway steps on stand-in rows, timed."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from batches import EncodedRows
from evaluation import evaluate
from loop import plain_optimizer, private_optimizer
from task import Task

ENOUGH_SECONDS = 5.0
STEPS = 6


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    encoding: float
    """Of one row: its tokens, and the layers that are frozen."""
    evaluation: float
    """Of one row: forward only."""
    gradient: float
    """Of one row: forward, backward and clipping."""
    update: float
    """Of one step, whatever its batch: noise, accounting and the optimizer's update."""
    batch: int
    """Expected rows of the pieces that were timed."""


def measure(args: argparse.Namespace, task: Task, stand_ins: list[tuple[str, int]], rows: int, sigma: Any) -> Timing:
    """Times pieces of the size that a run on ``rows`` rows would use, with an optimizer that is then thrown away.

    Args:
        task: prepared from ``stand_ins``; its network is trained a little.
        sigma: the noise multiplier; None where the run is not private.
    """
    piece = min(args.physical_batch_size or args.batch_size, args.batch_size, rows)
    small = copy.copy(args)
    # Batches of one piece each, and a budget that never stops these steps.
    small.batch_size, small.physical_batch_size, small.epochs, small.epsilon = piece, None, STEPS, 1e6
    several = replace(task, train=repeated(task.train, 4 * piece))
    if sigma is None:
        loader, optimizer, _ = plain_optimizer(small, several)
    else:
        loader, optimizer, _ = private_optimizer(small, several, None, noise_multiplier=sigma)
    samples = _timed_steps(task, loader, optimizer)
    if sigma is not None:
        optimizer.detach()
    return Timing(
        encoding=_duration(lambda: task.encode(stand_ins)) / len(stand_ins),
        evaluation=_duration(lambda: evaluate(task.network, task.train, task.join)) / len(task.train),
        gradient=sum(gradient for _, gradient, _ in samples) / sum(rows for rows, _, _ in samples),
        update=sum(update for _, _, update in samples) / len(samples),
        batch=piece,
    )


def _timed_steps(task: Task, loader: Any, optimizer: Any) -> list[tuple[int, float, float]]:
    """Of each step: its rows, the seconds of forward and backward, and those of the update."""
    from paddle.nn import functional as F

    samples = []
    task.network.train()
    begun = time.perf_counter()
    for _, (inputs, labels) in zip(range(STEPS), loader):
        started = time.perf_counter()
        F.cross_entropy(task.network(*inputs), labels).backward()
        halfway = time.perf_counter()
        optimizer.step()
        optimizer.clear_grad()
        float(task.trained_parameters[0].sum())  # a device has finished the step when its result can be read
        ended = time.perf_counter()
        samples.append((len(labels), halfway - started, ended - halfway))
        # The first step also allocates, and does not count.
        if len(samples) > 1 and ended - begun > ENOUGH_SECONDS:
            break
    return samples[1:]


def _duration(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def repeated(rows: EncodedRows, count: int) -> EncodedRows:
    """The rows over and over, ``count`` in all; the arrays are shared."""
    chosen = [row % len(rows) for row in range(count)]
    return EncodedRows([rows.inputs[row] for row in chosen], [rows.labels[row] for row in chosen])
