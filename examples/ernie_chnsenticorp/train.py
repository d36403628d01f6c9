"""Fine-tune ERNIE on Chinese sentiment under a privacy budget.

    python examples/ernie_chnsenticorp/train.py                                 # embedded data, tiny ERNIE, ε <= 3
    python examples/ernie_chnsenticorp/train.py --model ernie-3.0-medium-zh --data chnsenticorp --epsilon 3

:func:`train` is Paddle's usual loop, and :func:`private_optimizer` the lines that make it private.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import time
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from arguments import parse_arguments

if TYPE_CHECKING:
    from run_folder import Progress, RunFolder
    from task import Task


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    # Importing Paddle advises on ccache and on OMP_NUM_THREADS, which concerns nobody here.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        import paddle  # noqa: F401
    from ernie import ModelError
    from reviews import DataError

    try:
        return run(args)
    except (DataError, ModelError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    from evaluation import evaluate
    from run_folder import Progress, RunFolder
    from strategies import plain_model
    from summary import configuration, describe_plan, print_summary, summarise
    from task import prepare

    from paddle_privacy.ledger import Ledger

    started = time.monotonic()
    folder = RunFolder(args.output)
    task = prepare(args, folder.model)
    ledger: Any = contextlib.nullcontext() if args.non_private else Ledger(folder.ledger)
    try:
        if args.non_private:
            loader, optimizer, schedule = plain_optimizer(args, task)
        else:
            loader, optimizer, schedule = private_optimizer(args, task, ledger)
    except ValueError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    steps = args.epochs * len(loader)
    folder.write_json("config.json", configuration(args, task, steps, optimizer))
    describe_plan(args, task, steps, optimizer)

    with ledger, Progress(steps) as progress:
        ended = train(args, task, optimizer, schedule, loader, folder, progress)

    folder.save_model(plain_model(task.model), task.tokenizer)
    if task.prompt is not None:
        folder.write_json("model/prompt.json", asdict(task.prompt))
    score = evaluate(task.network, task.test, task.join)
    summary = summarise(args, task, score, optimizer, ended, schedule.last_epoch, time.monotonic() - started)
    folder.write_json("summary.json", summary)
    print_summary(args, summary)
    return 0


def train(
    args: argparse.Namespace,
    task: Task,
    optimizer: Any,
    schedule: Any,
    loader: Any,
    folder: RunFolder,
    progress: Progress,
) -> str:
    """Runs the epochs; returns how it ended: ``"completed"``, ``"interrupted"`` or ``"budget spent"``."""
    from averaging import MovingAverage
    from evaluation import evaluate
    from paddle.nn import functional as F

    from paddle_privacy import PrivacyBudgetExceeded

    started = time.monotonic()
    average = None if args.ema is None else MovingAverage(task.trained_parameters, args.ema)
    stop = Stop()
    ended = "completed"
    previous_handler = signal.signal(signal.SIGINT, stop)
    try:
        task.network.train()
        for epoch in range(1, args.epochs + 1):
            for inputs, labels in loader:
                loss = F.cross_entropy(task.network(*inputs), labels)
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                if args.non_private or optimizer.spending.steps > schedule.last_epoch:
                    # One logical batch is complete: under --physical-batch-size it takes several pieces.
                    schedule.step()
                    progress.step()
                    if average is not None:
                        average.update()
                    if stop.asked:
                        ended = "interrupted"
                        break
            with contextlib.nullcontext() if average is None else average.in_place():
                score = evaluate(task.network, task.dev, task.join)
            epsilon = None if args.non_private else optimizer.get_privacy_spent(args.delta).epsilon
            elapsed = time.monotonic() - started
            progress.epoch(epoch, args.epochs, score.loss, score.accuracy, epsilon, elapsed)
            folder.append_metrics(
                {
                    "epoch": epoch,
                    "step": schedule.last_epoch,
                    "dev_loss": score.loss,
                    "dev_accuracy": score.accuracy,
                    "epsilon": epsilon,
                    "seconds": round(elapsed, 1),
                }
            )
            if ended != "completed":
                break
    except PrivacyBudgetExceeded as refusal:
        progress.say(str(refusal))
        ended = "budget spent"
    finally:
        signal.signal(signal.SIGINT, previous_handler)
    if average is not None:
        average.put_in_place()
    return ended


def private_optimizer(args: argparse.Namespace, task: Task, ledger: Any) -> tuple[Any, Any, Any]:
    """Poisson batches, and the optimizer that clips, adds noise and counts."""
    from paddle.io import DataLoader

    import paddle_privacy
    from paddle_privacy import PoissonBatchSampler

    sampler = PoissonBatchSampler(task.train, args.batch_size, max_physical_batch_size=args.physical_batch_size)
    loader = DataLoader(task.train, batch_sampler=sampler, collate_fn=task.join)
    schedule = linear_decay(args.learning_rate, args.epochs * len(loader))
    make = {
        "adamw": paddle_privacy.DPAdamW,
        "adam": paddle_privacy.DPAdam,
        "adambc": paddle_privacy.DPAdamBC,
        "momentum": paddle_privacy.DPMomentum,
        "sgd": paddle_privacy.DPSGD,
    }[args.optimizer]
    optimizer = make(
        parameters=task.trained_parameters,
        learning_rate=schedule,
        weight_decay=args.weight_decay,
        clip_norm=task.clip_norm,
        clipping=args.clipping,
        accountant=args.accountant,
        batch_size=args.batch_size,
        epochs=args.epochs,
        data_loader=loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        max_epsilon=args.epsilon,
        ledger=ledger,
    )
    return loader, optimizer, schedule


def plain_optimizer(args: argparse.Namespace, task: Task) -> tuple[Any, Any, Any]:
    """Shuffled batches and Paddle's own optimizer."""
    import paddle
    from paddle.io import DataLoader

    loader = DataLoader(task.train, batch_size=args.batch_size, shuffle=True, collate_fn=task.join)
    schedule = linear_decay(args.learning_rate, args.epochs * len(loader))
    make = {
        "adamw": paddle.optimizer.AdamW,
        "adam": paddle.optimizer.Adam,
        "momentum": paddle.optimizer.Momentum,
        "sgd": paddle.optimizer.SGD,
    }[args.optimizer]
    optimizer = make(parameters=task.trained_parameters, learning_rate=schedule, weight_decay=args.weight_decay)
    return loader, optimizer, schedule


def linear_decay(peak: float, steps: int) -> Any:
    """From ``peak`` at the first step towards 0 after the last; counts the steps in ``last_epoch``."""
    from paddle.optimizer.lr import LambdaDecay

    return LambdaDecay(peak, lambda step: max(0.0, 1.0 - step / steps))


class Stop:
    """Ctrl-C asks for the end after the current step; a second one ends at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, signum: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this step; what was trained so far will be saved", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
