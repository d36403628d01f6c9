"""`--dry-run`: noise, budget, time and memory of a run, before any of it is spent.

Of the training file only the number of rows and the labels' names are used. What is timed are a few throwaway steps on
random characters, every row as long as ``--max-length`` allows, so the times are upper bounds for shorter texts.
"""

from __future__ import annotations

import argparse
import copy
import math
import resource
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ernie
import numpy as np
import reviews
from loop import plain_optimizer, private_optimizer
from run_folder import print_table
from task import prepare
from timing import Timing, measure, repeated

STAND_INS = 64
MILESTONES = (0.1, 0.25, 0.5, 0.75, 1.0)
MEBI = 2**20


def dry_run(args: argparse.Namespace) -> int:
    """Prints what a run with these flags would do, and leaves nothing behind.

    Raises:
        reviews.DataError, ernie.ModelError, ValueError: what the run itself would refuse.
    """
    data = reviews.load(args.data)
    if args.drop_test_texts:
        data = reviews.without_test_texts(data)
    rows = len(data.train) if args.keep_duplicates else len(reviews.deduplicate(data.train).rows)
    print(
        f"dry run: of {args.data} the {rows} training rows were counted and the {len(data.labels)} labels listed; all "
        "that follows is computed from these and from random text"
    )
    args = copy.copy(args)
    bound_unknown = args.clip_norm == "auto" and args.clip_norm_data is None
    if bound_unknown:
        args.clip_norm = 1.0  # any: what is printed does not depend on it
    args.keep_duplicates, args.state_cache = True, None  # the stand-ins have none, and are not to be kept
    random_rows = stand_ins(data, args.max_length)
    with tempfile.TemporaryDirectory() as folder:
        task = prepare(args, Path(folder), random_rows)
    planned = replace(task, train=repeated(task.train, rows))
    trained = sum(int(parameter.size) for parameter in task.trained_parameters)
    if args.non_private:
        steps, sigma = args.epochs * len(plain_optimizer(args, planned)[0]), None
        table = [("batch", f"{args.batch_size} of {rows} rows; not private")]
    else:
        loader, optimizer, _ = private_optimizer(args, planned, None)
        steps, sigma = args.epochs * len(loader), optimizer.noise_multiplier
        table = privacy_rows(args, optimizer, loader, steps, trained, bound_unknown)
        optimizer.detach()
    timing = measure(args, task, random_rows.train, rows, sigma)
    held = rows + len(data.dev) + len(data.test)
    table += [
        ("steps", f"{steps} in {args.epochs} epochs"),
        ("trained parameters", f"{trained:,}"),
        *time_rows(args, timing, steps, held, args.epochs * len(data.dev) + len(data.test)),
        ("expected peak memory (host)", f"{peak_mebibytes(held * bytes_of(task.train.inputs) / len(task.train))} MiB"),
    ]
    print_table(f"{args.model} on {args.data}: dry run, nothing was written", table)
    if not args.non_private:
        print(f"other batch sizes and numbers of epochs:\n  {plan_command(args, rows, steps)}")
    return 0


def privacy_rows(
    args: argparse.Namespace, optimizer: Any, loader: Any, steps: int, trained: int, bound_unknown: bool
) -> list[tuple[str, str]]:
    """Noise against signal, and ε along the way.

    Signal is the sum of B gradients of norm C that all agree, B·C: the most a batch can hold. The noise has standard
    deviation σ·C in each of the d coordinates, so its norm is about σ·C·√d. C cancels out of the ratio.
    """
    from paddle_privacy.accounting import get_accountant

    sigma, batch = optimizer.noise_multiplier, args.batch_size
    event = loader.batch_sampler.event(optimizer.clipping.mechanism(sigma))
    spent = []
    for part in MILESTONES:
        done = max(1, math.floor(part * steps))
        epsilon = get_accountant(args.accountant).compose(event, done).get_epsilon(args.delta)
        spent.append(f"{epsilon:.3f} after {done}")
    noise = "σC/B" if bound_unknown else f"σC/B = {sigma * optimizer.clip_norm / batch:.3g}"
    return [
        ("σ (noise multiplier)", f"{sigma:.4f}"),
        ("C (clip norm)", "read off the rows when the run starts" if bound_unknown else f"{optimizer.clip_norm:.4g}"),
        ("B (expected batch)", f"{batch} of {optimizer.spending.num_rows} rows, Poisson"),
        ("noise in a coordinate of the mean gradient", noise),
        ("signal to noise in one coordinate, B/σ", f"{batch / sigma:.4g}"),
        ("signal to noise of the whole gradient, B/(σ√d)", f"{batch / (sigma * math.sqrt(trained)):.4g}"),
        (f"ε at δ={args.delta:g} after steps", "; ".join(spent)),
    ]


def time_rows(args: argparse.Namespace, timing: Timing, steps: int, held: int, evaluated: int) -> list[tuple[str, str]]:
    """``held`` rows are encoded once; ``evaluated`` counts a dev row once an epoch and a test row once."""
    step = args.batch_size * timing.gradient + timing.update
    parts = (held * timing.encoding, steps * step, evaluated * timing.evaluation)
    encoding, training, evaluation = map(duration, parts)
    return [
        ("one step", f"{step:.3g} s; timed in pieces of {timing.batch} rows of {args.max_length} tokens"),
        ("expected time", f"{duration(sum(parts))}, less where texts are shorter"),
        ("  of which", f"encoding {encoding}, training {training}, evaluation {evaluation}"),
    ]


def plan_command(args: argparse.Namespace, rows: int, steps: int) -> str:
    """The `paddle-privacy plan` whose table holds this run and its neighbours.

    `plan` takes N/B steps an epoch, which the recipe rounds up, so the run's epochs are there its steps times B/N.
    """
    # Rounded down: up would be a step more.
    epochs = [math.floor(1e6 * steps * args.batch_size / rows * factor) / 1e6 for factor in (0.5, 1, 2)]
    sizes = [size for size in (args.batch_size // 2, args.batch_size, 2 * args.batch_size) if 0 < size <= rows]
    words = ["paddle-privacy", "plan", "--target-epsilon", repr(args.epsilon), "--delta", repr(args.delta)]
    words += ["--dataset-size", str(rows), "--batch-sizes", ",".join(map(str, sizes))]
    words += ["--epochs", ",".join(repr(value) for value in epochs), "--accountant", args.accountant]
    return shlex.join(words)


def stand_ins(data: reviews.Reviews, length: int) -> reviews.Reviews:
    """Rows of random common Chinese characters; every label occurs."""
    random = np.random.default_rng(0)
    characters = [token for token in ernie.tiny_vocabulary() if len(token) == 1 and ord(token) >= 0x4E00]

    def rows(count: int) -> list[reviews.Row]:
        texts = random.choice(characters, size=(count, length))
        return [("".join(text), number % len(data.labels)) for number, text in enumerate(texts)]

    train = rows(max(STAND_INS, len(data.labels)))
    return reviews.Reviews(train, train[:1], train[:1], data.labels, public=True)


def bytes_of(arrays: Any) -> int:
    return sum(array.nbytes for array in arrays)


def peak_mebibytes(rows: float) -> int:
    """This process so far, whose pieces were as large as the run's, and ``rows`` bytes of encoded rows."""
    return math.ceil(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 + rows / MEBI)


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
