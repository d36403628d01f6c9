"""`--staged`: does this clip norm, batch and learning rate learn at all, before noise and budget come in?

Stage 1 trains with clipping and without noise (σ = 0) for the planned epochs. That protects nobody, so it runs on
public rows (``--staged-data``); with ``--non-private`` it runs on the rows of ``--data``, and there is no stage 2. If
it does not learn, noise is not the reason, and the run ends before any of the budget is spent. Otherwise stage 2 is
the private run, from the original weights: of stage 1 only the verdict is kept.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import reviews
from evaluation import Score, evaluate
from loop import Training, private_optimizer, train
from run_folder import Progress, RunFolder
from task import prepare

RECORD = "stage1.json"

SAME_ROWS = 0.1
"""Public rows of which a larger part stands in the private training file are taken for private rows."""
STANDARD_ERRORS = 3.0


def stage_one(args: argparse.Namespace, data: reviews.Reviews, folder: RunFolder) -> bool:
    """Trains without noise, writes and prints the verdict; returns whether it learns.

    Args:
        data: the rows of ``--data``.

    Raises:
        reviews.DataError: there are no public rows for it.
        KeyboardInterrupt: stopped by Ctrl-C; nothing private has been spent then.
    """
    rows = data if args.non_private else public_rows(args, data)
    alone = copy.copy(args)
    # No accountant has a finite ε for it, so none is asked.
    alone.non_private, alone.accountant, alone.ema = True, "rdp", None
    alone.data = args.data if args.non_private else args.staged_data or args.data
    alone.clip_norm_data = args.clip_norm_data or (alone.data if args.clip_norm == "auto" else None)
    print(f"stage 1: clipping without noise on {alone.data}; nothing of it is kept but {folder.path / RECORD}")
    if args.non_private and not data.public:
        print(f"warning: this stage is NOT PRIVATE: no ε covers what it tells of the training rows of {args.data}")
    with tempfile.TemporaryDirectory() as unused:
        task = prepare(alone, Path(unused), rows)
    training = Training(*private_optimizer(alone, task, None, noise_multiplier=0.0))
    before = evaluate(task.network, task.dev, task.join)
    metrics: list[dict[str, Any]] = []
    with Progress(args.epochs * len(training.loader)) as progress:
        ended = train(alone, task, training, progress, metrics.append)
    training.optimizer.detach()
    if ended != "completed":
        raise KeyboardInterrupt
    after = evaluate(task.network, task.dev, task.join)
    found = {
        "statement": f"stage 1 added no noise, so it is not private; it was trained on {alone.data}",
        "clip_norm": task.clip_norm,
        "learning_rate": args.learning_rate,
        "batch_size": args.batch_size,
        "steps": training.steps_taken,
        **verdict(before, after, task.dev.labels),
        "epochs": metrics,
    }
    folder.write_json(RECORD, found)
    print_verdict(found)
    return bool(found["learns"])


def passed(folder: RunFolder) -> bool:
    """Whether the run was through stage 1 before it was interrupted."""
    return bool(folder.read_json(RECORD).get("learns"))


def public_rows(args: argparse.Namespace, private: reviews.Reviews) -> reviews.Reviews:
    """The rows of stage 1, at most as many for training as ``private`` has.

    Raises:
        reviews.DataError: they are missing, malformed, or the private rows under another name.
    """
    name = args.staged_data or args.data
    same = name == args.data or (Path(name).is_dir() and Path(args.data).is_dir() and Path(name).samefile(args.data))
    if same and not private.public:
        raise reviews.DataError(
            "--staged: stage 1 adds no noise, so what it trains is not private, and --data is the private data; pass "
            "public rows with --staged-data (mini will do for a first look), or --non-private for a run that protects "
            "nobody"
        )
    public = private if same else reviews.load(name)
    if not same:
        shared = reviews.share_of(public.train, private.train)
        if shared > SAME_ROWS:
            raise reviews.DataError(
                f"--staged-data {name}: {shared:.0%} of its training rows stand in the private training file too, so "
                "they are not public rows; stage 1 adds no noise and would give them away"
            )
    chosen = np.random.default_rng(args.seed).permutation(len(public.train))[: len(private.train)]
    return reviews.Reviews([public.train[row] for row in chosen], public.dev, public.test, public.labels, public.public)


def verdict(before: Score, after: Score, labels: Sequence[int]) -> dict[str, Any]:
    """Whether the loss fell and the accuracy is above what the commonest label alone gives.

    Above means by three standard errors of a guess that is right with the commonest label's share.
    """
    rows = len(labels)
    commonest = float(np.bincount(labels).max()) / rows
    margin = STANDARD_ERRORS * math.sqrt(commonest * (1.0 - commonest) / rows)
    return {
        "dev_rows": rows,
        "dev_loss_before": before.loss,
        "dev_loss_after": after.loss,
        "dev_accuracy_before": before.accuracy,
        "dev_accuracy_after": after.accuracy,
        "commonest_label": commonest,
        "learns": after.loss < before.loss and after.accuracy > commonest + margin,
    }


def print_verdict(found: dict[str, Any]) -> None:
    print(
        f"stage 1, clipping to {found['clip_norm']:.4g} without noise: dev loss {found['dev_loss_before']:.4f} -> "
        f"{found['dev_loss_after']:.4f}, dev accuracy {found['dev_accuracy_before']:.2%} -> "
        f"{found['dev_accuracy_after']:.2%}; the commonest label has {found['commonest_label']:.2%}"
    )
    if found["learns"]:
        print("stage 1 verdict: learns without noise")
    else:
        print(
            "stage 1 verdict: does not learn even without noise, so noise is not the reason; change --learning-rate "
            f"({found['learning_rate']:g}), --epochs, --clip-norm or --strategy first"
        )
