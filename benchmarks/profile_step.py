"""Where the time of a step goes, and what holds its memory at the peak.

    OMP_NUM_THREADS=2 python benchmarks/profile_step.py encoder lora      # time, private beside plain
    OMP_NUM_THREADS=2 python benchmarks/profile_step.py encoder --memory  # what is alive at the peak

Time comes from Paddle's own profiler, one process a kind of step. Every event is counted without the events inside it,
and belongs to the innermost section of the step that it runs in. A section's *kernels* are Paddle's kernels and the
package's native operators; the rest of it is *Python and dispatch*: the interpreter, Paddle's bindings, shape inference
and graph nodes, and the waiting for memory that these do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
from measure import optimizer_for
from paddle.profiler import Profiler, ProfilerTarget, RecordEvent
from workloads import ROWS, Row

SECTION = "section: "


def mark(name: str, owner: Any, method: str) -> None:
    """From now on `owner.method` runs in a section of its own."""
    inner = getattr(owner, method)

    def marked(*args: Any, **kwargs: Any) -> Any:
        with RecordEvent(SECTION + name):
            return inner(*args, **kwargs)

    setattr(owner, method, marked)


def mark_sections() -> None:
    from paddle_privacy import clipped_sum, optimizer
    from paddle_privacy.gradients import hooks, tap
    from paddle_privacy.kernels import native

    mark("hooks in the forward pass", hooks.LayerHooks, "_before")
    mark("hooks in the forward pass", hooks.LayerHooks, "_after")
    mark("capture in the backward pass", tap.Tap, "arrive")
    mark("norms", clipped_sum.ClippedSum, "_squared_norms")
    mark("clipping and sums", clipped_sum.ClippedSum, "_add")
    mark("noise and update", optimizer.PrivateOptimizer, "_update")
    run = native.call

    def call(operator: str, *arguments: Any) -> None:
        with RecordEvent(f"native {operator}"):
            run(operator, *arguments)

    native.call = call


def sectioned_step(row: Row, private: bool) -> Callable[[], None]:
    if private:
        mark_sections()
    paddle.seed(0)
    model, loss = row.make()
    model.train()
    optimizer = optimizer_for(row, [p for p in model.parameters() if not p.stop_gradient], private)

    def step() -> None:
        with RecordEvent(SECTION + "forward"):
            value = loss(model)
        with RecordEvent(SECTION + "backward"):
            value.backward()
        with RecordEvent(SECTION + ("rest of step()" if private else "noise and update")):
            optimizer.step()
            optimizer.clear_grad()

    return step


def trace(row: Row, private: bool, steps: int) -> dict:
    """Milliseconds of one step: {section: {"kernels": {name: ms}, "python": ms}}, a mean over `steps`."""
    step = sectioned_step(row, private)
    for _ in range(2):
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        profiler = Profiler(targets=[ProfilerTarget.CPU], on_trace_ready=lambda p: p.export(path, "json"))
        profiler.start()
        for _ in range(steps):
            step()
        profiler.stop()
        events = json.loads(Path(path).read_text())["traceEvents"]
    sections: dict = defaultdict(lambda: {"kernels": defaultdict(float), "python": 0.0})
    for section, kernel, milliseconds in own_times(events):
        if kernel is None:
            sections[section]["python"] += milliseconds / steps
        else:
            sections[section]["kernels"][kernel] += milliseconds / steps
    return sections


def own_times(events: list[dict]) -> list[tuple[str, str | None, float]]:
    """(section, kernel or None, milliseconds without nested events) of every event inside a section.

    Args:
        events: of a Chrome trace, with `name`, `ts` and `dur` in microseconds; from one thread.
    """
    timed = sorted((e for e in events if "dur" in e), key=lambda e: (e["ts"], -e["dur"]))
    # [end, section, kernel, time of its own] of the events that are open, outermost first.
    stack: list[list] = []
    found: list[tuple[str, str | None, float]] = []

    def close(before: float) -> None:
        while stack and stack[-1][0] <= before:
            _, section, kernel, own = stack.pop()
            if section:
                found.append((section, kernel, own / 1e3))

    for event in timed:
        close(event["ts"])
        name = event["name"].rsplit("[", 1)[0].strip()
        section, kernel = (stack[-1][1], stack[-1][2]) if stack else ("", None)
        if name.startswith(SECTION):
            section, kernel = name[len(SECTION) :], None
        elif name.endswith(" kernel launch"):
            kernel = name[: -len(" kernel launch")]
        elif name.startswith("native "):
            kernel = name
        if stack:
            stack[-1][3] -= event["dur"]
        stack.append([event["ts"] + event["dur"], section, kernel, event["dur"]])
    close(float("inf"))
    return found


def total(section: dict) -> float:
    return section["python"] + sum(section["kernels"].values())


def print_time(name: str, plain: dict, private: dict, kernels: int) -> None:
    order = dict.fromkeys(["forward", "hooks in the forward pass", "backward", "capture in the backward pass", "norms"])
    order.update(dict.fromkeys(["clipping and sums", "noise and update", "rest of step()"]))
    order.update(dict.fromkeys([*plain, *private]))
    print(f"{name}: milliseconds of a step")
    print(f"  {'section':32}{'plain':>9}{'private':>9}   of which kernels, Python and dispatch")
    empty: dict = {"kernels": {}, "python": 0.0}
    for key in order:
        a, b = plain.get(key, empty), private.get(key, empty)
        if total(a) + total(b) > 0:
            inside = f"{sum(b['kernels'].values()):9.1f}{b['python']:9.1f}"
            print(f"  {key:32}{total(a):9.1f}{total(b):9.1f}   {inside}")
    sums = [sum(map(total, found.values())) for found in (plain, private)]
    python = [sum(s["python"] for s in found.values()) for found in (plain, private)]
    print(f"  {'all':32}{sums[0]:9.1f}{sums[1]:9.1f}   ratio {sums[1] / sums[0]:.3f}")
    print(f"  {'Python and dispatch':32}{python[0]:9.1f}{python[1]:9.1f}")
    difference: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for position, found in enumerate((plain, private)):
        for section in found.values():
            for kernel, milliseconds in section["kernels"].items():
                difference[kernel][position] += milliseconds
    print(f"  {'kernel':32}{'plain':>9}{'private':>9}{'more':>9}")
    ranked = sorted(difference.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    for kernel, (a, b) in ranked[:kernels]:
        print(f"  {kernel:32}{a:9.1f}{b:9.1f}{b - a:+9.1f}")


def in_own_process(arguments: list[str]) -> dict:
    """The profiler cannot be started twice in a process, and memory is best measured in a fresh one."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tempfile.gettempdir()).stdout
    return json.loads(out.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="row", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--memory", action="store_true", help="what is alive at the memory peak instead")
    parser.add_argument("--steps", type=int, default=3, help="steps to average over")
    parser.add_argument("--kernels", type=int, default=10, help="how many kernels to list")
    parser.add_argument("--kind", choices=("plain", "private"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    unknown = sorted(set(options.rows) - set(ROWS))
    if unknown:
        parser.error(f"unknown rows {unknown}; choose from {', '.join(ROWS)}")
    if options.kind and options.memory:
        from peak_memory import account

        print(json.dumps(account(ROWS[options.rows[0]], options.kind == "private")))
        return
    if options.kind:
        print(json.dumps(trace(ROWS[options.rows[0]], options.kind == "private", options.steps)))
        return
    for name in options.rows:
        common = [name, "--steps", str(options.steps)] + ["--memory"] * options.memory
        plain, private = (in_own_process([*common, "--kind", kind]) for kind in ("plain", "private"))
        if options.memory:
            from peak_memory import print_account

            print_account(name, plain, private)
        else:
            print_time(name, plain, private, options.kernels)


if __name__ == "__main__":
    main()
