"""Fine-tune ERNIE on Chinese sentiment under a privacy budget.

    python examples/ernie_chnsenticorp/train.py                                 # embedded data, tiny ERNIE, ε <= 3
    python examples/ernie_chnsenticorp/train.py --model ernie-3.0-medium-zh --data chnsenticorp --epsilon 3

:func:`train` is Paddle's usual loop, and :func:`private_optimizer` the lines that make it private.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import time
from typing import Any

from arguments import parse_arguments


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    from reviews import DataError

    try:
        return run(args)
    except (DataError, FileExistsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    import reviews

    data = reviews.load(args.data)
    train_rows = training_rows(data.train, args)
    from ernie import ModelError, encode, freeze_layers, load, quiet_import
    from run_folder import Progress, RunFolder

    with quiet_import():
        import paddle
    from batches import EncodedRows

    from paddle_privacy.ledger import Ledger

    folder = RunFolder(args.output)
    paddle.seed(args.seed)
    try:
        model, tokenizer = load(args.model, len(data.labels), args.dropout, folder.model)
        freeze_layers(model, args.freeze_layers)
        clip_norm = None if args.non_private else chosen_clip_norm(args, model, tokenizer, train_rows, data.public)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    rows = EncodedRows(
        encode(tokenizer, [text for text, _ in train_rows], args.max_length), [label for _, label in train_rows]
    )
    held_out = {
        name: EncodedRows(encode(tokenizer, [text for text, _ in part], args.max_length), [label for _, label in part])
        for name, part in (("dev", data.dev), ("test", data.test))
    }
    pad_id = tokenizer.pad_token_id
    if args.non_private:
        loader, optimizer, schedule = plain_optimizer(args, model, rows, pad_id)
        ledger: Any = contextlib.nullcontext()
    else:
        ledger = Ledger(folder.ledger)
        try:
            loader, optimizer, schedule = private_optimizer(args, model, rows, pad_id, clip_norm, ledger)
        except ValueError as refusal:
            print(f"error: {refusal}", file=sys.stderr)
            return 2
    steps = args.epochs * len(loader)
    folder.write_json("config.json", configuration(args, len(rows.labels), steps, optimizer))
    describe_plan(args, len(rows.labels), steps, optimizer)

    with ledger, Progress(steps) as progress:
        ended = train(args, model, optimizer, schedule, loader, held_out["dev"], pad_id, folder, progress)

    from evaluation import evaluate

    score = evaluate(model, held_out["test"], pad_id)
    unseen = reviews.unseen_mask(data.test, data.train)
    folder.save_model(model, tokenizer)
    summary = {
        "ended": ended,
        "test_accuracy": score.accuracy,
        "test_rows": len(unseen),
        "test_accuracy_unseen": float(score.correct[unseen].mean()) if any(unseen) else None,
        "test_rows_unseen": sum(unseen),
        "steps": schedule.last_epoch,
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        **privacy_of(args, optimizer),
    }
    folder.write_json("summary.json", summary)
    print_summary(args, summary, folder)
    return 0


def train(
    args: argparse.Namespace,
    model: Any,
    optimizer: Any,
    schedule: Any,
    loader: Any,
    dev: Any,
    pad_id: int,
    folder: Any,
    progress: Any,
) -> str:
    """Runs the epochs; returns how it ended: ``"completed"``, ``"interrupted"`` or ``"budget spent"``."""
    from ernie import logits
    from evaluation import evaluate
    from paddle.nn import functional as F

    from paddle_privacy import PrivacyBudgetExceeded

    started = time.monotonic()
    stop = Stop()
    ended = "completed"
    previous_handler = signal.signal(signal.SIGINT, stop)
    try:
        model.train()
        for epoch in range(1, args.epochs + 1):
            for input_ids, labels in loader:
                loss = F.cross_entropy(logits(model, input_ids), labels)
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                if args.non_private or optimizer.spending.steps > schedule.last_epoch:
                    # One logical batch is complete: under --physical-batch-size it takes several pieces.
                    schedule.step()
                    progress.step()
                    if stop.asked:
                        ended = "interrupted"
                        break
            score = evaluate(model, dev, pad_id)
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
    return ended


def private_optimizer(
    args: argparse.Namespace, model: Any, rows: Any, pad_id: int, clip_norm: float, ledger: Any
) -> tuple[Any, Any, Any]:
    """Poisson batches, and the optimizer that clips, adds noise and counts."""
    from batches import collate
    from paddle.io import DataLoader

    import paddle_privacy
    from paddle_privacy import PoissonBatchSampler

    sampler = PoissonBatchSampler(rows, args.batch_size, max_physical_batch_size=args.physical_batch_size)
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=collate(pad_id))
    schedule = linear_decay(args.learning_rate, args.epochs * len(loader))
    make = {
        "adamw": paddle_privacy.DPAdamW,
        "adam": paddle_privacy.DPAdam,
        "momentum": paddle_privacy.DPMomentum,
        "sgd": paddle_privacy.DPSGD,
    }[args.optimizer]
    optimizer = make(
        parameters=[p for p in model.parameters() if not p.stop_gradient],
        learning_rate=schedule,
        weight_decay=args.weight_decay,
        clip_norm=clip_norm,
        batch_size=args.batch_size,
        epochs=args.epochs,
        data_loader=loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        max_epsilon=args.epsilon,
        ledger=ledger,
    )
    return loader, optimizer, schedule


def plain_optimizer(args: argparse.Namespace, model: Any, rows: Any, pad_id: int) -> tuple[Any, Any, Any]:
    """Shuffled batches and Paddle's own optimizer."""
    import paddle
    from batches import collate
    from paddle.io import DataLoader

    loader = DataLoader(rows, batch_size=args.batch_size, shuffle=True, collate_fn=collate(pad_id))
    schedule = linear_decay(args.learning_rate, args.epochs * len(loader))
    make = {
        "adamw": paddle.optimizer.AdamW,
        "adam": paddle.optimizer.Adam,
        "momentum": paddle.optimizer.Momentum,
        "sgd": paddle.optimizer.SGD,
    }[args.optimizer]
    trained = [p for p in model.parameters() if not p.stop_gradient]
    return loader, make(parameters=trained, learning_rate=schedule, weight_decay=args.weight_decay), schedule


def linear_decay(peak: float, steps: int) -> Any:
    """From ``peak`` at the first step towards 0 after the last; counts the steps in ``last_epoch``."""
    from paddle.optimizer.lr import LambdaDecay

    return LambdaDecay(peak, lambda step: max(0.0, 1.0 - step / steps))


def training_rows(train: list[tuple[str, int]], args: argparse.Namespace) -> list[tuple[str, int]]:
    from reviews import deduplicate, most_copies

    if args.keep_duplicates:
        copies = most_copies(train)
        if copies > 1:
            print(
                f"training rows: {len(train)}, with duplicates; the commonest text stands {copies} times, and ε "
                f"protects one of these rows, not the text: for it the bound is about {copies} times ε"
            )
        return train
    found = deduplicate(train)
    print(
        f"training rows: {len(found.rows)} of {len(train)}; dropped {found.repeats} repeats of a text and all "
        f"{found.conflicting_rows} rows of {found.conflicting_texts} texts that carry more than one label"
    )
    return found.rows


def chosen_clip_norm(
    args: argparse.Namespace, model: Any, tokenizer: Any, train_rows: list[tuple[str, int]], public: bool
) -> float:
    if args.clip_norm != "auto":
        return float(args.clip_norm)
    import reviews
    from clip_norm import PERCENTILE, percentile_clip_norm, sample_rows
    from ernie import encode

    rows = train_rows
    if args.clip_norm_data is not None:
        source = reviews.load(args.clip_norm_data)
        rows, public = source.train, True
    chosen = [rows[i] for i in sample_rows(len(rows), args.seed)]
    encoded = encode(tokenizer, [text for text, _ in chosen], args.max_length)
    value = percentile_clip_norm(model, [(ids, label) for ids, (_, label) in zip(encoded, chosen)])
    print(f"clip norm: {value:.4g}, the {PERCENTILE}th percentile of {len(chosen)} gradient norms")
    if not public:
        print(
            "warning: this clip norm was read off the private training rows, and ε does not cover that peek; pass "
            "public rows of the same kind with --clip-norm-data, or a number"
        )
    return value


def configuration(args: argparse.Namespace, rows: int, steps: int, optimizer: Any) -> dict[str, Any]:
    flags = {name: str(value) if name == "output" else value for name, value in vars(args).items()}
    if args.non_private:
        return {"flags": flags, "training_rows": rows, "planned_steps": steps, "privacy": None}
    return {
        "flags": flags,
        "training_rows": rows,
        "planned_steps": steps,
        "privacy": optimizer.privacy_statement(),
    }


def describe_plan(args: argparse.Namespace, rows: int, steps: int, optimizer: Any) -> None:
    plan = f"{args.model} on {args.data}: {rows} rows, {args.epochs} epochs, {steps} steps"
    if args.non_private:
        print(f"{plan} of {args.batch_size} rows, not private")
        return
    print(
        f"{plan} of {args.batch_size} expected rows (Poisson), σ={optimizer.noise_multiplier:.4f}, "
        f"C={optimizer.clip_norm:.4g}, budget ε={args.epsilon:g} at δ={args.delta:g}"
    )
    if args.delta >= 1 / rows:
        print(f"warning: δ={args.delta:g} is not below 1/{rows}; it permits publishing some row as it is")


def privacy_of(args: argparse.Namespace, optimizer: Any) -> dict[str, Any]:
    if args.non_private:
        return {"epsilon": None}
    statement = optimizer.privacy_statement()
    unit = statement["unit"]
    if not args.keep_duplicates:
        unit += ", with all copies of its text"
    return {
        "epsilon": optimizer.get_privacy_spent(args.delta).epsilon,
        "delta": args.delta,
        "noise_multiplier": optimizer.noise_multiplier,
        "clip_norm": optimizer.clip_norm,
        "unit": unit,
        "relation": statement["relation"],
        "sampling": statement["sampling"],
        "accountant": statement["accountant"],
    }


def print_summary(args: argparse.Namespace, summary: dict[str, Any], folder: Any) -> None:
    from run_folder import print_table

    rows = [("test accuracy", f"{summary['test_accuracy']:.2%} of {summary['test_rows']} rows")]
    if summary["test_accuracy_unseen"] is not None:
        rows.append(
            (
                "  unseen in train",
                f"{summary['test_accuracy_unseen']:.2%} of {summary['test_rows_unseen']} rows",
            )
        )
    if args.non_private:
        rows.append(("privacy", "none"))
    else:
        rows += [
            ("ε (epsilon)", f"{summary['epsilon']:.4f}"),
            ("δ (delta)", f"{summary['delta']:g}"),
            ("σ (noise multiplier)", f"{summary['noise_multiplier']:.4f}"),
            ("C (clip norm)", f"{summary['clip_norm']:.4g}"),
            ("unit of privacy", summary["unit"]),
            ("relation", summary["relation"].replace("_", " ")),
            ("sampling", f"{summary['sampling']}, {args.batch_size} expected rows"),
            ("accountant", summary["accountant"]),
        ]
    rows += [
        ("steps", str(summary["steps"])),
        ("time", f"{summary['seconds']:.0f} s"),
        ("peak memory", f"{summary['peak_memory_mib']} MiB"),
        ("run folder", str(folder.path)),
    ]
    print_table(f"{args.model} on {args.data}: {summary['ended']}", rows)


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
