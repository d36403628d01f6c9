"""The commands ``epsilon``, ``noise`` and ``plan``: what a training run would cost, before it is run."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import typer

from ..errors import PrivacyWarning
from .calibration import calibrate_noise_multiplier, default_delta, get_accountant
from .events import Event, Gaussian, PoissonSampled, ShuffledEpoch

ASSUMES = {
    "rdp": "Poisson batches: every row joins every batch independently. Renyi bound, add-or-remove-one.",
    "pld": "Poisson batches: every row joins every batch independently. Numerical bound, add-or-remove-one.",
    "zcdp": "Shuffled or unknown batches, each row once per epoch; no amplification is claimed. Exact, zero-out.",
}


def epsilon(
    dataset_size: int = typer.Option(..., min=1, help="Rows in the training set, N."),
    batch_size: int = typer.Option(..., min=1, help="Expected batch size, B."),
    epochs: Optional[float] = typer.Option(None, help="Passes over the data; or give --steps."),  # noqa: UP045
    steps: Optional[int] = typer.Option(None, min=0, help="Optimizer steps; or give --epochs."),  # noqa: UP045
    noise_multiplier: float = typer.Option(..., help="Noise standard deviation over the clip norm, sigma."),
    delta: Optional[float] = typer.Option(None, help="Target delta; rule of thumb N^-1.1 if absent."),  # noqa: UP045
    group_size: int = typer.Option(1, min=1, help="Rows protected together."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    plot: Optional[str] = typer.Option(None, help="Write epsilon over epochs to this image file."),  # noqa: UP045
) -> None:
    """Epsilon of a planned run: by RDP and PLD for Poisson batches, by zCDP without amplification."""
    rate, count, passes = _schedule(dataset_size, batch_size, epochs, steps)
    delta = _delta(delta, dataset_size)
    rows: list[dict[str, Any]] = []
    for name in ("rdp", "pld", "zcdp"):
        accountant = get_accountant(name).compose(*_event(name, noise_multiplier, rate, count, passes))
        value = accountant.get_epsilon(delta, group_size)
        row = {"accountant": name, "epsilon": value, "relation": accountant.relation, "assumes": ASSUMES[name]}
        rows.append(row)
    facts: dict[str, Any] = {
        "dataset_size": dataset_size,
        "batch_size": batch_size,
        "sample_rate": rate,
        "steps": count,
        "participations_if_shuffled": passes,
        "noise_multiplier": noise_multiplier,
        "delta": delta,
        "group_size": group_size,
    }
    if plot:
        _plot_epsilon(plot, noise_multiplier, rate, count, delta)
        facts["plot"] = plot
    if as_json:
        # JSON has no infinity: null says that there is no finite epsilon.
        finite = [{**row, "epsilon": row["epsilon"] if math.isfinite(row["epsilon"]) else None} for row in rows]
        print(json.dumps({**facts, "results": finite}, indent=2))
        return
    unit = "one row" if group_size == 1 else f"any {group_size} rows together"
    title = (
        f"sigma={noise_multiplier:g}, N={dataset_size}, B={batch_size}, {count} steps, delta={delta:g}; unit: {unit}"
    )
    print_table(
        title,
        ["accountant", "epsilon", "relation", "what it assumes"],
        [[row["accountant"], _number(row["epsilon"]), row["relation"], row["assumes"]] for row in rows],
    )


def noise(
    target_epsilon: float = typer.Option(..., help="Epsilon that must not be exceeded."),
    dataset_size: int = typer.Option(..., min=1, help="Rows in the training set, N."),
    batch_size: int = typer.Option(..., min=1, help="Expected batch size, B."),
    epochs: Optional[float] = typer.Option(None, help="Passes over the data; or give --steps."),  # noqa: UP045
    steps: Optional[int] = typer.Option(None, min=0, help="Optimizer steps; or give --epochs."),  # noqa: UP045
    delta: Optional[float] = typer.Option(None, help="Target delta; rule of thumb N^-1.1 if absent."),  # noqa: UP045
    group_size: int = typer.Option(1, min=1, help="Rows protected together."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """The smallest noise multiplier that keeps a planned run within a target epsilon."""
    rate, count, passes = _schedule(dataset_size, batch_size, epochs, steps)
    delta = _delta(delta, dataset_size)
    rows: list[dict[str, Any]] = []
    for name in ("rdp", "pld", "zcdp"):
        sigma = _calibrate(name, target_epsilon, delta, rate, count, passes, group_size)
        accountant = get_accountant(name).compose(*_event(name, sigma, rate, count, passes))
        rows.append(
            {
                "accountant": name,
                "noise_multiplier": sigma,
                "epsilon": accountant.get_epsilon(delta, group_size),
                "relation": accountant.relation,
                "assumes": ASSUMES[name],
            }
        )
    if as_json:
        facts = {"target_epsilon": target_epsilon, "delta": delta, "sample_rate": rate, "steps": count}
        print(json.dumps({**facts, "group_size": group_size, "results": rows}, indent=2))
        return
    print_table(
        f"epsilon <= {target_epsilon:g}, N={dataset_size}, B={batch_size}, {count} steps, delta={delta:g}",
        ["accountant", "noise multiplier", "epsilon", "what it assumes"],
        [[r["accountant"], _round_up(r["noise_multiplier"]), _number(r["epsilon"]), r["assumes"]] for r in rows],
    )


def plan(
    target_epsilon: float = typer.Option(..., help="Epsilon that must not be exceeded."),
    dataset_size: int = typer.Option(..., min=1, help="Rows in the training set, N."),
    batch_sizes: str = typer.Option("64,128,256,512,1024", help="Batch sizes to compare, separated by commas."),
    epochs: str = typer.Option("1,3,10,30", help="Numbers of epochs to compare, separated by commas."),
    delta: Optional[float] = typer.Option(None, help="Target delta; rule of thumb N^-1.1 if absent."),  # noqa: UP045
    accountant: str = typer.Option("rdp", help="rdp or pld for Poisson batches, zcdp for shuffled ones."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    plot: Optional[str] = typer.Option(None, help="Write the signal-to-noise ratios to this image file."),  # noqa: UP045
) -> None:
    """A table of (batch size, epochs) -> noise multiplier and signal-to-noise ratio.

    Signal-to-noise is B/sigma: the sum of B gradients of norm C that agree, over the noise in one coordinate. In a
    model of d parameters the noise vector is sqrt(d) times as long. "Over the run" multiplies by the root of the steps:
    what averaging over all updates can recover.
    """
    delta = _delta(delta, dataset_size)
    sizes = _numbers("batch-sizes", batch_sizes, int)
    passes_list = _numbers("epochs", epochs, float)
    cells = [(size, passes) for size in sizes if size <= dataset_size for passes in passes_list]
    if not cells:
        raise ValueError(f"batch-sizes must hold a size of at most dataset-size = {dataset_size}, got {batch_sizes!r}.")
    rows: list[dict[str, Any]] = []
    for size, passes in _progress(cells, quiet=as_json):
        rate, count, participations = _schedule(dataset_size, size, passes, None)
        sigma = _calibrate(accountant, target_epsilon, delta, rate, count, participations, 1)
        rows.append(
            {
                "batch_size": size,
                "epochs": passes,
                "steps": count,
                "noise_multiplier": sigma,
                "signal_to_noise": size / sigma,
                "signal_to_noise_over_the_run": math.sqrt(count) * size / sigma,
            }
        )
    if plot:
        _plot_plan(plot, rows, target_epsilon, delta)
    if as_json:
        facts = {"target_epsilon": target_epsilon, "delta": delta, "dataset_size": dataset_size}
        print(json.dumps({**facts, "accountant": accountant, "rows": rows}, indent=2))
        return
    print_table(
        f"epsilon <= {target_epsilon:g}, delta={delta:g}, N={dataset_size} ({accountant})",
        ["batch size", "epochs", "steps", "noise multiplier", "signal/noise per step", "over the run"],
        [
            [
                str(row["batch_size"]),
                f"{row['epochs']:g}",
                str(row["steps"]),
                _round_up(row["noise_multiplier"]),
                f"{row['signal_to_noise']:.4g}",
                f"{row['signal_to_noise_over_the_run']:.4g}",
            ]
            for row in rows
        ],
        ASSUMES[accountant],
    )


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """A rich table on a terminal, aligned plain text (one row a line) elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, caption=note or None)
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    print(title)
    for line in [columns, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    if note:
        print(note)


def _schedule(size: int, batch: int, epochs: float | None, steps: int | None) -> tuple[float, int, int]:
    """(sampling rate, steps, participations of a row if batches are a shuffled partition)."""
    if (epochs is None) == (steps is None):
        raise ValueError("Exactly one of --epochs and --steps must be given.")
    if batch > size:
        raise ValueError(f"--batch-size must be at most --dataset-size = {size}, got {batch}.")
    if steps is None:
        assert epochs is not None
        if not 0 <= epochs < math.inf:
            raise ValueError(f"--epochs must be a number >= 0, got {epochs!r}.")
        # A fraction of an epoch still is a step for someone, and a participation for someone.
        steps = math.ceil(epochs * size / batch - 1e-9)
        return batch / size, steps, math.ceil(epochs)
    # An epoch of a shuffled loader that keeps its last, short batch has ceil(N/B) steps; fewer would cost more.
    return batch / size, steps, math.ceil(steps / max(1, size // batch))


def _event(name: str, sigma: float, rate: float, steps: int, participations: int) -> tuple[Event, int]:
    if name == "zcdp":
        return ShuffledEpoch(Gaussian(sigma)), participations
    return (Gaussian(sigma) if rate == 1 else PoissonSampled(rate, Gaussian(sigma))), steps


def _calibrate(name: str, target: float, delta: float, rate: float, steps: int, passes: int, group: int) -> float:
    if name not in ASSUMES:
        raise ValueError(f"--accountant must be one of {', '.join(ASSUMES)}; got {name!r}.")

    def event(sigma: float) -> Event:
        return _event(name, sigma, rate, steps, passes)[0]

    return calibrate_noise_multiplier(
        event,
        target_epsilon=target,
        target_delta=delta,
        count=passes if name == "zcdp" else steps,
        accountant=name,
        group_size=group,
    )


def _delta(delta: float | None, dataset_size: int) -> float:
    if delta is not None:
        return delta
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrivacyWarning)
        value = default_delta(dataset_size)
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)
    return value


def _numbers(name: str, text: str, kind: type) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--{name} must be numbers separated by commas, got {text!r}.") from None
    if not values or any(not value > 0 for value in values):
        raise ValueError(f"--{name} must hold positive numbers, got {text!r}.")
    return values


def _number(value: float) -> str:
    # Rounded up: a printed epsilon is a bound too.
    return "infinite" if math.isinf(value) else f"{math.ceil(value * 1e4) / 1e4:.4f}"


def _round_up(sigma: float) -> str:
    # Someone will type the printed value back in; a rounded-down sigma would overshoot the target.
    return f"{math.ceil(sigma * 1e4) / 1e4:.4f}"


def _progress(cells: Sequence[Any], quiet: bool) -> Iterable[Any]:
    if quiet or not sys.stderr.isatty():
        return cells
    from rich.console import Console
    from rich.progress import track

    return track(cells, description="calibrating", console=Console(stderr=True), transient=True)


def _figure() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib; install it with: pip install 'paddle-privacy[cli]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plot_epsilon(path: str, sigma: float, rate: float, steps: int, delta: float) -> None:
    import numpy as np

    from .rdp_accountant import epsilon_curve

    counts = np.unique(np.linspace(0, steps, 400).astype(int))
    figure = _figure()
    axes = figure.add_subplot()
    poisson = _event("rdp", sigma, rate, 1, 1)[0]
    axes.plot(counts, epsilon_curve(poisson, counts, delta), label="Poisson batches (RDP)")
    few = np.unique(np.linspace(1, max(steps, 1), 12).astype(int))
    tight = [get_accountant("pld").compose(poisson, int(count)).get_epsilon(delta) for count in few]
    axes.plot(few, tight, "o-", markersize=3, label="Poisson batches (PLD)")
    epochs = np.ceil(counts * rate - 1e-9).astype(int)
    unamplified = {
        int(k): get_accountant("zcdp").compose(Gaussian(sigma), int(k)).get_epsilon(delta) for k in set(epochs)
    }
    axes.plot(counts, [unamplified[int(k)] for k in epochs], label="Shuffled batches, no amplification")
    axes.set_xlabel("steps")
    axes.set_ylabel(f"epsilon at delta = {delta:g}")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _plot_plan(path: str, rows: Sequence[dict[str, Any]], target: float, delta: float) -> None:
    figure = _figure()
    axes = figure.add_subplot()
    for passes in sorted({row["epochs"] for row in rows}):
        mine = [row for row in rows if row["epochs"] == passes]
        axes.plot(
            [row["batch_size"] for row in mine],
            [row["signal_to_noise_over_the_run"] for row in mine],
            "o-",
            label=f"{passes:g} epochs",
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size")
    axes.set_ylabel(f"signal-to-noise over the run, epsilon <= {target:g}, delta = {delta:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
