"""How time and memory of a step grow: one curve a quantity, plain and private, with the exponents found.

    OMP_NUM_THREADS=2 python benchmarks/curves.py                 # every curve, into benchmarks/curves/
    OMP_NUM_THREADS=2 python benchmarks/curves.py length sampler  # some of them

Each curve is a JSON and a PNG (matplotlib). The exponent k of y = c·xᵏ is the slope of least squares through the
logarithms of the upper half of the points, where constant costs weigh least. Times are medians of processor
time, all points and both kinds in turns; memory is the peak that Paddle's allocator handed out during a step, above
what was allocated before the model was made. The model is an encoder of 2 layers of width 128 unless it is what varies.
(`scaling.py` is about many processes.)
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measure import allocated_now, allocated_peak, reset_allocated_peak, stepper
from workloads import Made, Row, encoder, fresh_batches

FOLDER = Path(__file__).with_name("curves")
Measured = dict[str, dict[str, list[float]]]


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line through the logarithms of the upper half of the points (at least three)."""
    kept = max(3, (len(x) + 1) // 2)
    return float(np.polyfit(np.log(x[-kept:]), np.log(y[-kept:]), 1)[0])


@dataclass(frozen=True)
class Curve:
    """One quantity: its values, how a row is made from a value, and how many samples of the batch a step has."""

    label: str
    values: tuple[int, ...]
    row: Callable[[int], Row]
    expected: str


def small(batch: int = 8, length: int = 64, layers: int = 2, width: int = 128) -> Made:
    return encoder(batch, length, layers=layers, width=width, heads=4, vocab=1000)


def parameters_of(width: int) -> int:
    return sum(p.size for p in small(width=width)[0].parameters())


CURVES: dict[str, Curve] = {
    "batch": Curve(
        "samples in a batch B",
        (2, 4, 8, 16, 32, 64),
        lambda b: Row(lambda: small(batch=b), b),
        "time and activations are linear in B",
    ),
    "length": Curve(
        "sequence length T",
        (32, 64, 128, 256, 512),
        lambda t: Row(lambda: small(batch=4, length=t), 4),
        "linear layers are linear in T; attention, and ghost norms where they are taken, are quadratic",
    ),
    "depth": Curve(
        "encoder layers",
        (1, 2, 4, 8, 16),
        lambda n: Row(lambda: small(layers=n), 8),
        "linear, above the embeddings",
    ),
    "parameters": Curve(
        "trained parameters (by width)",
        (64, 128, 256, 512, 1024),
        lambda w: Row(lambda: small(batch=4, width=w), 4),
        "linear in the parameters once products outweigh activations",
    ),
    "logical": Curve(
        "samples in a logical batch, 32 at a time",
        (1, 2, 4, 8, 16),
        lambda k: Row(lambda: fresh_batches(32, 32), 32, pieces=k),
        "time linear; memory flat but for the batch's own inputs",
    ),
}


def median_seconds(points: list[dict[str, Callable[[], object]]], repetitions: int) -> dict[str, list[float]]:
    """For each kind the medians at all points, in turns: a machine that is slower for a while does not tilt a curve."""
    seconds: list[dict[str, list[float]]] = [{kind: [] for kind in steps} for steps in points]
    for _ in range(repetitions):
        for found, steps in zip(seconds, points):
            for kind, step in steps.items():
                start = time.process_time()
                step()
                found[kind].append(time.process_time() - start)
    return {kind: [statistics.median(found[kind]) for found in seconds] for kind in points[0]}


def _peak(step: Callable[[], None]) -> float:
    reset_allocated_peak()
    step()
    return allocated_peak()


def measure_curve(name: str, repetitions: int) -> dict:
    curve = CURVES[name]
    measured: Measured = {kind: {"seconds": [], "mib": []} for kind in ("plain", "private")}
    points: list[dict[str, Callable[[], object]]] = []
    for value in curve.values:
        row = curve.row(value)
        points.append({})
        for kind in measured:
            gc.collect()
            before = allocated_now()
            step = stepper(row, kind)
            # The first private step also looks at the model's structure, and a later one looks again.
            measured[kind]["mib"].append(min([_peak(step) for _ in range(3 if row.pieces == 1 else 2)][1:]) - before)
            points[-1][kind] = step
    for kind, seconds in median_seconds(points, repetitions).items():
        measured[kind]["seconds"] = seconds
    x = list(curve.values)
    if name == "parameters":
        x = [parameters_of(width) for width in x]
    if name == "logical":
        x = [32 * pieces for pieces in x]
    return finish(name, curve.label, curve.expected, x, measured)


def measure_sampler(repetitions: int) -> dict:
    """Drawing a Poisson batch of 256 expected rows out of N, and the same with one coin a row for comparison."""
    from paddle_privacy.sampling.poisson import PoissonBatchSampler

    x = [10**k for k in range(4, 9)]
    measured: Measured = {kind: {"seconds": [], "mib": []} for kind in ("one coin a row", "PoissonBatchSampler")}
    points: list[dict[str, Callable[[], object]]] = []
    for rows in x:
        sampler = PoissonBatchSampler(num_rows=rows, batch_size=256, steps=2 * repetitions + 1)
        batches = iter(sampler)
        generator = np.random.default_rng()

        def coins(rows: int = rows, generator: np.random.Generator = generator) -> object:
            return np.flatnonzero(generator.random(rows, dtype=np.float32) < 256 / rows)

        draws: dict[str, Callable[[], object]] = {
            "one coin a row": coins,
            "PoissonBatchSampler": lambda batches=batches: next(batches),
        }
        for kind, draw in draws.items():
            tracemalloc.start()
            draw()
            measured[kind]["mib"].append(tracemalloc.get_traced_memory()[1] / 2**20)
            tracemalloc.stop()
        points.append(draws)
    for kind, seconds in median_seconds(points, repetitions).items():
        measured[kind]["seconds"] = seconds
    return finish("sampler", "rows of the data set N", "constant: proportional to the batch, not to N", x, measured)


def finish(name: str, label: str, expected: str, x: list[int], measured: Measured) -> dict:
    found = {"curve": name, "x": label, "values": x, "expected": expected, "clock": "processor", "measured": {}}
    for kind, both in measured.items():
        exponents = {quantity: round(exponent(x, y), 2) for quantity, y in both.items()}
        rounded = {quantity: [float(f"{value:.4g}") for value in y] for quantity, y in both.items()}
        found["measured"][kind] = {**rounded, "exponents": exponents}
    return found


def draw(found: dict, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("curves are drawn with matplotlib; pip install matplotlib, or pass --no-plots") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, quantity, label in zip(axes, ("seconds", "mib"), (f"{found['clock']} seconds a step", "peak MiB")):
        for (kind, measured), marker in zip(found["measured"].items(), "so"):
            slope = measured["exponents"][quantity]
            axis.loglog(found["values"], measured[quantity], marker=marker, label=f"{kind}: exponent {slope:.2f}")
        ticks = found["values"]
        axis.set_xticks(ticks, [f"{x:,}" if x < 10**5 else f"{x:.2g}".replace("e+0", "e") for x in ticks])
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_xlabel(found["x"])
        axis.set_ylabel(
            f"{found['clock']} seconds a batch" if found["curve"] == "sampler" and quantity == "seconds" else label
        )
        axis.grid(True, which="major", alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def table_line(found: dict) -> str:
    cells = [f"{found['x']}, {found['values'][0]:,} to {found['values'][-1]:,}"]
    for quantity in ("seconds", "mib"):
        cells += [f"{measured['exponents'][quantity]:.2f}" for measured in found["measured"].values()]
    return "| " + " | ".join([*cells, found["expected"]]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="*", metavar="curve", help=f"of {', '.join([*CURVES, 'sampler'])}")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--redraw", action="store_true", help="draw and print what was measured before")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names = options.curves or [*CURVES, "sampler"]
    unknown = sorted(set(names) - {*CURVES, "sampler"})
    if unknown:
        parser.error(f"unknown curves {unknown}; choose from {', '.join([*CURVES, 'sampler'])}")
    FOLDER.mkdir(exist_ok=True)
    print("| quantity | time, plain | time, private | memory, plain | memory, private | expected |")
    print("|---|---|---|---|---|---|")
    for name in names:
        kept = FOLDER / f"{name}.json"
        if options.redraw:
            found = json.loads(kept.read_text())
        else:
            found = (
                measure_sampler(options.repetitions) if name == "sampler" else measure_curve(name, options.repetitions)
            )
            kept.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        if not options.no_plots:
            draw(found, kept.with_suffix(".png"))
        print(table_line(found), flush=True)


if __name__ == "__main__":
    main()
