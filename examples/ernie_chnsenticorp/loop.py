"""Paddle's usual training loop (:func:`train`), and the lines that make it private (:func:`private_optimizer`)."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import paddle
from averaging import MovingAverage
from batches import ShuffledByLength
from evaluation import evaluate
from paddle.io import DataLoader
from paddle.nn import functional as F
from paddle.optimizer.lr import LambdaDecay
from run_folder import Progress
from task import Task

import paddle_privacy
from paddle_privacy import PoissonBatchSampler, PrivacyBudgetExceeded


class Refused(Exception):
    """The flags do not make a training run; the message names the argument."""


@dataclass
class Training:
    """What changes while a run trains; all of it goes into a checkpoint."""

    loader: Any
    optimizer: Any
    schedule: Any
    """The learning rate; ``last_epoch`` counts the steps taken."""
    average: MovingAverage | None = None
    seconds: float = 0.0
    """How long it has trained, before and after each ``--resume``."""

    @property
    def steps_taken(self) -> int:
        return int(self.schedule.last_epoch)

    def step_completed(self) -> bool:
        """Whether ``optimizer.step()`` was a step: with ``--physical-batch-size`` a logical batch takes several."""
        spending = getattr(self.optimizer, "spending", None)
        return spending is None or spending.steps > self.steps_taken


def train(
    args: argparse.Namespace,
    task: Task,
    training: Training,
    progress: Progress,
    record: Callable[[dict[str, Any]], None],
    save: Callable[[], None] | None = None,
) -> str:
    """Runs the epochs that are left; returns how it ended: ``"completed"``, ``"interrupted"`` or ``"budget spent"``.

    Args:
        record: takes what is known of the dev rows after each epoch.
        save: keeps ``training`` for ``--resume``, after each epoch and on Ctrl-C.
    """
    loader, optimizer, schedule, average = training.loader, training.optimizer, training.schedule, training.average
    steps_an_epoch = len(loader)
    begun = time.monotonic() - training.seconds
    ended = "completed"
    with Stop() as stop:
        try:
            task.network.train()
            for epoch in range(training.steps_taken // steps_an_epoch + 1, args.epochs + 1):
                for inputs, labels in loader:
                    loss = F.cross_entropy(task.network(*inputs), labels)
                    loss.backward()
                    optimizer.step()
                    optimizer.clear_grad()
                    if training.step_completed():
                        schedule.step()
                        progress.step()
                        if average is not None:
                            average.update()
                        # An epoch that was resumed has fewer steps left than its loader has batches.
                        if stop.asked or training.steps_taken == epoch * steps_an_epoch:
                            break
                if training.steps_taken < epoch * steps_an_epoch or (stop.asked and epoch < args.epochs):
                    ended = "interrupted"
                training.seconds = time.monotonic() - begun
                if save is not None:
                    save()
                with contextlib.nullcontext() if average is None else average.in_place():
                    score = evaluate(task.network, task.dev, task.join)
                epsilon = None if args.non_private else optimizer.get_privacy_spent(args.delta).epsilon
                training.seconds = time.monotonic() - begun
                progress.epoch(epoch, args.epochs, score.loss, score.accuracy, epsilon, training.seconds)
                record(
                    {
                        "epoch": epoch,
                        "step": training.steps_taken,
                        "dev_loss": score.loss,
                        "dev_accuracy": score.accuracy,
                        "epsilon": epsilon,
                        "seconds": round(training.seconds, 1),
                    }
                )
                if ended != "completed":
                    break
        except PrivacyBudgetExceeded as refusal:
            progress.say(str(refusal))
            ended = "budget spent"
    if average is not None:
        average.put_in_place()
    return ended


def private_optimizer(
    args: argparse.Namespace, task: Task, ledger: Any, noise_multiplier: float | None = None
) -> tuple[Any, Any, Any]:
    """Poisson batches, the optimizer that clips, adds noise and counts, and its learning rate.

    Args:
        noise_multiplier: instead of the one that spends ``--epsilon`` in the planned epochs; 0 clips without noise and
            protects nobody.

    Raises:
        Refused: the optimizer or the sampler refuses its arguments.
    """
    try:
        sampler = PoissonBatchSampler(task.train, args.batch_size, max_physical_batch_size=args.physical_batch_size)
    except ValueError as refusal:
        raise Refused(str(refusal)) from refusal
    loader = DataLoader(task.train, batch_sampler=sampler, collate_fn=cast(Any, task.join))
    schedule = linear_decay(args.learning_rate, args.epochs * len(loader))
    make = {
        "adamw": paddle_privacy.DPAdamW,
        "adam": paddle_privacy.DPAdam,
        "adambc": paddle_privacy.DPAdamBC,
        "momentum": paddle_privacy.DPMomentum,
        "sgd": paddle_privacy.DPSGD,
    }[args.optimizer]
    try:
        optimizer = make(
            parameters=task.parameter_groups(encoder_scale(args)),
            learning_rate=schedule,
            weight_decay=args.weight_decay,
            clip_norm=task.clip_norm,
            clipping=args.clipping,
            accountant=args.accountant,
            batch_size=args.batch_size,
            epochs=args.epochs,
            data_loader=loader,
            noise_multiplier=noise_multiplier,
            target_epsilon=args.epsilon if noise_multiplier is None else None,
            target_delta=args.delta,
            max_epsilon=None if noise_multiplier == 0 else args.epsilon,
            ledger=ledger,
        )
    except ValueError as refusal:
        raise Refused(str(refusal)) from refusal
    return loader, optimizer, schedule


def plain_optimizer(args: argparse.Namespace, task: Task) -> tuple[Any, Any, Any]:
    """Shuffled batches, Paddle's own optimizer, and its learning rate."""
    batches = ShuffledByLength(task.train, args.batch_size, args.seed)
    loader = DataLoader(task.train, batch_sampler=batches, collate_fn=cast(Any, task.join))
    schedule = linear_decay(args.learning_rate, args.epochs * len(loader))
    make = {
        "adamw": paddle.optimizer.AdamW,
        "adam": paddle.optimizer.Adam,
        "momentum": paddle.optimizer.Momentum,
        "sgd": paddle.optimizer.SGD,
    }[args.optimizer]
    groups = task.parameter_groups(encoder_scale(args))
    optimizer = make(parameters=groups, learning_rate=schedule, weight_decay=args.weight_decay)
    return loader, optimizer, schedule


def encoder_scale(args: argparse.Namespace) -> float:
    return 1.0 if args.encoder_learning_rate is None else args.encoder_learning_rate / args.learning_rate


def linear_decay(peak: float, steps: int) -> Any:
    """From ``peak`` at the first step towards 0 after the last; counts the steps in ``last_epoch``."""
    return LambdaDecay(peak, lambda step: max(0.0, 1.0 - step / steps))


class Stop(contextlib.AbstractContextManager["Stop"]):
    """Within, Ctrl-C or SIGTERM asks for the end after the current step; a second one ends at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(self, *raised: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this step; what was trained so far will be saved", file=sys.stderr, flush=True)
