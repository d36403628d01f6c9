"""What a run says about itself: the plan before it, config.json, summary.json and the table at the end."""

from __future__ import annotations

import argparse
import resource
import shlex
import time
from pathlib import Path
from typing import Any

from evaluation import Score
from run_folder import LEDGER, print_table
from task import Task


def describe_plan(args: argparse.Namespace, task: Task, steps: int, optimizer: Any) -> None:
    rows = len(task.train)
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


def configuration(args: argparse.Namespace, task: Task, steps: int, optimizer: Any) -> dict[str, Any]:
    return {
        "flags": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "training_rows": len(task.train),
        "trained_parameters": sum(int(parameter.size) for parameter in task.trained_parameters),
        "planned_steps": steps,
        "privacy": None if args.non_private else optimizer.privacy_statement(),
    }


def summarise(
    args: argparse.Namespace, task: Task, score: Score, optimizer: Any, ended: str, steps: int, seconds: float
) -> dict[str, Any]:
    unseen = score.correct[task.unseen]
    return {
        "ended": ended,
        "test_accuracy": score.accuracy,
        "test_rows": len(task.test),
        "test_accuracy_unseen": float(unseen.mean()) if len(unseen) else None,
        "test_rows_unseen": len(unseen),
        "steps": steps,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        **_privacy(args, optimizer),
    }


def _privacy(args: argparse.Namespace, optimizer: Any) -> dict[str, Any]:
    if args.non_private:
        return {"epsilon": None}
    statement = optimizer.privacy_statement()
    return {
        "epsilon": optimizer.get_privacy_spent(args.delta).epsilon,
        "delta": args.delta,
        "noise_multiplier": optimizer.noise_multiplier,
        "clip_norm": optimizer.clip_norm,
        "unit": statement["unit"] + ("" if args.keep_duplicates else ", with all copies of its text"),
        "relation": statement["relation"],
        "sampling": statement["sampling"],
        "accountant": statement["accountant"],
    }


def print_summary(args: argparse.Namespace, summary: dict[str, Any], outputs: list[tuple[str, Path]]) -> None:
    """
    Args:
        outputs: what else the run folder got: names and paths.
    """
    rows = [("test accuracy", f"{summary['test_accuracy']:.2%} of {summary['test_rows']} rows")]
    if summary["test_accuracy_unseen"] is not None:
        unseen = f"{summary['test_accuracy_unseen']:.2%} of {summary['test_rows_unseen']} rows"
        rows.append(("  unseen in train", unseen))
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
        ("run folder", f"{args.output}: config.json, summary.json, metrics.jsonl"),
        ("model", str(args.output / "model")),
    ]
    if not args.non_private:
        rows.append(("ledger", str(args.output / LEDGER)))
    rows += [(name, str(path)) for name, path in outputs]
    print_table(f"{args.model} on {args.data}: {summary['ended']}", rows)
    if summary["ended"] == "interrupted":
        print(f"go on with: train.py --resume {shlex.quote(str(args.output))}")
