"""report.html and the plots of a finished run, drawn from what its folder holds.

Both need packages that training does not; where one is missing, a line says so and the run is complete without.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from run_folder import RunFolder

INK, BLUE, ORANGE = "#333333", "#1f4e79", "#b45f06"


def write_outputs(args: argparse.Namespace, folder: RunFolder, summary: dict[str, Any]) -> list[tuple[str, Path]]:
    """Returns what was written: a name and a path each."""
    written = []
    for name, write in (
        ("report", lambda: _report(args, folder, summary)),
        ("accuracy plot", lambda: _plot_accuracy(args, folder)),
        ("ε plot", lambda: _plot_epsilon(args, folder)),
    ):
        try:
            path = write()
        except ImportError as missing:
            print(f"no {name}: {missing.name or missing} is not installed; pip install matplotlib jinja2")
            continue
        if path is not None:
            written.append((name, path))
    return written


def _report(args: argparse.Namespace, folder: RunFolder, summary: dict[str, Any]) -> Path | None:
    if not folder.ledger.is_file():
        return None
    import jinja2  # noqa: F401 - before the report's figures are worked out, which takes seconds

    from paddle_privacy.report import collect, write_report

    # Dev and test rows are not the ledger's rows, so what is known of them may stand beside it.
    utility = [{"metric": "test accuracy", "value": summary["test_accuracy"], "rows": summary["test_rows"]}]
    if summary["test_accuracy_unseen"] is not None:
        utility.append(
            {
                "metric": "test accuracy, rows unseen in train",
                "value": summary["test_accuracy_unseen"],
                "rows": summary["test_rows_unseen"],
            }
        )
    title = f"{args.model} on {args.data}"
    facts = collect([folder.ledger], max_epsilon=args.epsilon, utility=utility, title=title)
    path = folder.path / "report.html"
    write_report(facts, path)
    return path


def _plot_accuracy(args: argparse.Namespace, folder: RunFolder) -> Path | None:
    """Dev accuracy after each epoch, or the part of it that was trained before Ctrl-C."""
    planned = folder.read_json("config.json")["planned_steps"]
    points = [(args.epochs * line["step"] / planned, 100 * line["dev_accuracy"]) for line in folder.read_metrics()]
    if not points:
        return None
    path = folder.path / "accuracy.png"
    _line_chart(path, points, "epoch", "dev accuracy (%)", BLUE, whole=True)
    return path


def _plot_epsilon(args: argparse.Namespace, folder: RunFolder) -> Path | None:
    """ε after each step, as the ledger holds it, against the budget."""
    if not folder.ledger.is_file():
        return None
    from paddle_privacy.verify.chain import read_ledger

    spent = [epsilon for run in read_ledger(folder.ledger).runs for epsilon in run.epsilon]
    points = [(step, epsilon) for step, epsilon in enumerate(spent, start=1) if math.isfinite(epsilon)]
    if not points:
        return None
    path = folder.path / "epsilon.png"
    _line_chart(path, points, "step", f"ε at δ = {args.delta:g}", ORANGE, limit=args.epsilon)
    return path


def _line_chart(
    path: Path,
    points: Sequence[tuple[float, float]],
    across: str,
    up: str,
    color: str,
    limit: float | None = None,
    whole: bool = False,
) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    marker = "o" if len(points) <= 30 else ""
    axes.plot(*zip(*points), color=color, marker=marker, markersize=4)
    if limit is not None:
        axes.axhline(limit, color=INK, linestyle="--", linewidth=1)
        axes.annotate(f"budget {limit:g}", (points[0][0], limit), xytext=(0, 3), textcoords="offset points", color=INK)
        axes.set_ylim(0, 1.1 * max(limit, points[-1][1]))
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
