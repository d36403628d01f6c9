"""Time and peak memory of one private step against one plain Paddle step of the same model, with what it must cost.

    OMP_NUM_THREADS=2 python benchmarks/step.py                    # every row
    OMP_NUM_THREADS=2 python benchmarks/step.py encoder lstm       # some rows
    OMP_NUM_THREADS=2 python benchmarks/step.py --json found.json  # and keep the numbers
    OMP_NUM_THREADS=2 python benchmarks/step.py --quick            # small rows, against the recorded ones; a minute
    OMP_NUM_THREADS=2 python benchmarks/step.py --quick --record   # record them anew

The rows are in `workloads.py`, the harness in `measure.py`; `floors.py` counts the floors, which are printed as ratios
like everything else. The row `logical-4096` is one private step of 128 backward passes beside private steps of one
(time a sample) and of two (memory).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

from floors import Rates, floor_bytes, floor_seconds, uses_of
from measure import (
    MIB,
    Memory,
    Timing,
    allocated_peak,
    baseline_kind,
    machine_rates,
    memory_apart,
    print_memory,
    reset_allocated_peak,
    stepper,
    time_steps,
)
from workloads import QUICK, ROWS, Row

RECORDED = Path(__file__).with_name("step_quick.json")
# A quick row is reported where it is above the recorded one by more than this share of it. On a crowded machine the
# ratios of processor time were found up to 25 % higher; memory does not depend on that.
MARGINS = {"cpu": 0.30, "private_mib": 0.05}


def time_floor(row: Row, baseline: float, rates: Rates) -> float:
    """The least ratio to `baseline` seconds that a private step of `row` can have, on a machine with these rates."""
    model, loss = row.make()
    uses = uses_of(model, loss)
    if row.pieces > 1:
        # Against as many private steps: the noise of all of them but one is saved.
        saved = (row.pieces - 1) * sum(use.trained for use in uses) / rates.noise
        return 1.0 - saved / baseline
    return 1.0 + floor_seconds(uses, row.batch, rates) / baseline


def memory_floor(row: Row, baseline: Memory) -> float:
    """The least ratio to the baseline's allocated peak that a private step of `row` can have."""
    if row.pieces > 1:
        return 1.0
    model, loss = row.make()
    early = row.clipping == "per_layer"
    least = floor_bytes(uses_of(model, loss), row.batch, baseline.parameters, baseline.forward * MIB, early)
    return least / (baseline.allocated * MIB)


def measure_row(name: str, rates: Rates, repetitions: int, with_memory: bool) -> dict:
    row = ROWS[name]
    kind, share = baseline_kind(row)
    baseline_step, private_step = stepper(row, kind), stepper(row, "private")
    if row.pieces == 1:
        timing = time_steps(baseline_step, private_step, repetitions)
    else:
        timing = time_steps(baseline_step, private_step, min(repetitions, 5), share=share)
    found = {"time": asdict(timing), "time_floor": time_floor(row, timing.baseline, rates), "target": row.time}
    if with_memory:
        baseline, private = memory_apart(name, kind if row.pieces == 1 else "two"), memory_apart(name, "private")
        found["memory"] = {
            "baseline_mib": baseline.allocated,
            "private_mib": private.allocated,
            "ratio": private.allocated / baseline.allocated,
            "first": private.first / baseline.allocated,
            "resident": private.resident / baseline.resident,
        }
        found["memory_floor"], found["memory_target"] = memory_floor(row, baseline), row.memory
    return found


def line_of(name: str, found: dict) -> str:
    t = found["time"]
    line = f"{name:18}{1e3 * t['baseline']:9.1f}{1e3 * t['private']:10.1f}{t['ratio']:7.3f}"
    line += f" ({t['lower']:.2f}-{t['upper']:.2f}){t['processor']:7.3f}{found['time_floor']:7.3f}{found['target']:7.2f}"
    if "memory" not in found:
        return line
    m = found["memory"]
    line += f"{m['baseline_mib']:9.0f}{m['private_mib']:9.0f}{m['ratio']:7.3f}{m['first']:7.3f}{m['resident']:7.2f}"
    return line + f"{found['memory_floor']:7.3f}{found['memory_target']:7.2f}"


HEADER = (
    f"{'row':18}{'plain ms':>9}{'priv. ms':>10}{'time':>7}{'(quartiles)':>12}{'cpu':>7}{'floor':>7}{'target':>7}"
    f"{'plain MiB':>10}{'private':>8}{'memory':>7}{'first':>7}{'resid.':>7}{'floor':>7}{'target':>7}"
)


def table(names: list[str], repetitions: int, with_memory: bool, json_path: str | None) -> None:
    rates = machine_rates()
    print(
        f"machine: {rates.multiply_adds / 1e9:.1f} G multiply-adds/s, {rates.bytes / 1e9:.1f} GB/s, "
        f"{rates.noise / 1e6:.0f} M values of noise/s"
    )
    print(HEADER)
    everything = {"rates": asdict(rates), "rows": {}}
    for name in names:
        found = measure_row(name, rates, repetitions, with_memory)
        everything["rows"][name] = found
        print(line_of(name, found), flush=True)
    if json_path:
        Path(json_path).write_text(json.dumps(everything, indent=1))


def quick_row(row: Row) -> dict[str, float]:
    """Ratios of processor time and of the allocator's peak, in one process; the fastest of a few runs of each."""
    peaks, steps = {}, {}
    for kind in ("plain", "private"):
        steps[kind] = stepper(row, kind)
        steps[kind]()
        reset_allocated_peak()
        steps[kind]()
        peaks[kind] = allocated_peak()
    timing: Timing = time_steps(steps["plain"], steps["private"], 7)
    return {"time": timing.ratio, "cpu": timing.processor, "private_mib": peaks["private"]}


def quick(record: bool) -> int:
    """Prints the small rows beside the recorded ones; the number of rows that got slower or larger."""
    start = time.perf_counter()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    print(f"{'row':18}{'time':>7}{'cpu':>7}{'recorded':>10}{'MiB':>8}{'recorded':>10}")
    found, worse = {}, []
    for name, row in QUICK.items():
        now = found[name] = quick_row(row)
        before = recorded.get(name)
        line = f"{name:18}{now['time']:7.2f}{now['cpu']:7.2f}"
        if before is not None:
            line += f"{before['cpu']:10.2f}{now['private_mib']:8.0f}{before['private_mib']:10.0f}"
            for key, margin in MARGINS.items():
                if now[key] > (1 + margin) * before[key]:
                    worse.append(f"{name}: {key} {before[key]:.2f} -> {now[key]:.2f}")
        print(line, flush=True)
    if record:
        rounded = {name: {key: round(value, 3) for key, value in row.items()} for name, row in found.items()}
        RECORDED.write_text(json.dumps(rounded, indent=1) + "\n")
        print(f"recorded in {RECORDED.name}")
        return 0
    print(f"{time.perf_counter() - start:.0f} s")
    beyond = f"by more than {MARGINS['cpu']:.0%} in processor time or {MARGINS['private_mib']:.0%} in memory"
    print("\n".join([f"worse {beyond}:", *worse]) if worse else f"no row is worse {beyond}")
    return len(worse)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="small rows against the recorded ones")
    parser.add_argument("--record", action="store_true", help="with --quick: record what is found")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", metavar="PATH", help="also write what is found")
    parser.add_argument("--memory-of", nargs=2, metavar=("ROW", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.memory_of:
        print_memory(ROWS[options.memory_of[0]], options.memory_of[1])
        return
    if options.quick:
        sys.exit(1 if quick(options.record) else 0)
    unknown = sorted(set(options.rows) - set(ROWS))
    if unknown:
        parser.error(f"unknown rows {unknown}; choose from {', '.join(ROWS)}")
    table(options.rows or list(ROWS), options.repetitions, not options.no_memory, options.json)


if __name__ == "__main__":
    main()
