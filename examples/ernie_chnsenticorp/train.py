"""Fine-tune ERNIE on Chinese sentiment under a privacy budget.

    python examples/ernie_chnsenticorp/train.py                                 # embedded data, tiny ERNIE, ε <= 3
    python examples/ernie_chnsenticorp/train.py --model ernie-3.0-medium-zh --data chnsenticorp --epsilon 3
    python examples/ernie_chnsenticorp/train.py --dry-run                       # what a run would cost; spends nothing
    python examples/ernie_chnsenticorp/train.py --resume runs/20260101-120000   # after Ctrl-C or kill -9

What trains is in ``loop.py``: :func:`loop.train` is Paddle's usual loop, and :func:`loop.private_optimizer` the lines
that make it private.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from arguments import parse_arguments
from resuming import Checkpoints, ResumeError, refuse_other_data, refuse_where_nothing_is_left

if TYPE_CHECKING:
    from loop import Training
    from run_folder import RunFolder
    from task import Task


def main(argv: list[str] | None = None) -> int:
    """0: done; 1: stage 1 of ``--staged`` does not learn; 2: refused; 130: ended by a second Ctrl-C."""
    args = parse_arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    # Importing Paddle advises on ccache and on OMP_NUM_THREADS, which concerns nobody here.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        import paddle  # noqa: F401
    from ernie import ModelError
    from loop import Refused
    from reviews import DataError

    from paddle_privacy.errors import PrivacyError

    try:
        if args.dry_run:
            from dry_run import dry_run

            return dry_run(args)
        return run(args)
    except (DataError, ModelError, Refused, ResumeError, FileExistsError, PrivacyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; if training had begun, go on with --resume {args.output}", file=sys.stderr)
        return 130


def run(args: argparse.Namespace) -> int:
    import predict
    import reviews
    import staged
    from evaluation import evaluate
    from loop import train
    from outputs import write_outputs
    from run_folder import Progress, RunFolder
    from strategies import plain_model
    from summary import configuration, describe_plan, print_summary, summarise
    from task import prepare

    from paddle_privacy.ledger import Ledger

    started = time.monotonic()
    resumed = args.resume is not None
    folder = RunFolder(args.output, resume=resumed)
    if resumed:
        refuse_where_nothing_is_left(folder)
    data = reviews.load(args.data)
    if args.drop_test_texts:
        data = reviews.without_test_texts(data)
    if args.staged and not staged.passed(folder):
        learns = staged.stage_one(args, data, folder)
        if args.non_private or not learns:
            return 0 if learns else 1
    task = prepare(args, folder.model, data)
    ledger: Any = contextlib.nullcontext() if args.non_private else Ledger(folder.ledger)
    training = new_training(args, task, ledger)
    checkpoints = Checkpoints(folder.checkpoint, task, training)
    steps = args.epochs * len(training.loader)
    if resumed:
        resume(folder, checkpoints, len(task.train))
    else:
        folder.write_json("config.json", configuration(args, task, steps, training.optimizer))
        # From here on the run can be resumed, also when it is killed in its first epoch.
        checkpoints.save()
    describe_plan(args, task, steps, training.optimizer)
    earlier = training.seconds

    with ledger, Progress(steps, training.steps_taken) as progress:
        ended = train(args, task, training, progress, folder.append_metrics, checkpoints.save)

    folder.save_model(plain_model(task.model), task.tokenizer)
    predict.save(folder.model, task, args.strategy, args.max_length)
    score = evaluate(task.network, task.test, task.join)
    seconds = earlier + time.monotonic() - started
    summary = summarise(args, task, score, training.optimizer, ended, training.steps_taken, seconds)
    folder.write_json("summary.json", summary)
    if ended != "interrupted":
        checkpoints.remove()
    print_summary(args, summary, write_outputs(args, folder, summary))
    return 0


def new_training(args: argparse.Namespace, task: Task, ledger: Any) -> Training:
    """From the original weights and the first step on."""
    from averaging import MovingAverage
    from loop import Training, plain_optimizer, private_optimizer

    parts = plain_optimizer(args, task) if args.non_private else private_optimizer(args, task, ledger)
    average = None if args.ema is None else MovingAverage(task.trained_parameters, args.ema)
    return Training(*parts, average)


def resume(folder: RunFolder, checkpoints: Checkpoints, rows: int) -> None:
    """Puts the training where the interrupted run left it."""
    refuse_other_data(folder, rows)
    folder.drop_torn_metrics()
    if not checkpoints.exists:
        return
    lost = checkpoints.load()
    print(f"resumed: {checkpoints.training.steps_taken} steps were taken", end="")
    print(f"; of {lost} of them the weights are lost, and ε still counts them" if lost else "")


if __name__ == "__main__":
    sys.exit(main())
