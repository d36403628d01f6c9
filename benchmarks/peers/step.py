"""One private step here and in Opacus, each against the plain step of its own framework, in one run.

    OMP_NUM_THREADS=2 python benchmarks/peers/step.py --python PEER/bin/python               # every row
    OMP_NUM_THREADS=2 python benchmarks/peers/step.py --python PEER/bin/python encoder lora  # some rows

PEER: an environment of its own with torch and opacus (``python -m venv PEER && PEER/bin/pip install torch opacus``).

Five kinds of step: Paddle plain and private, PyTorch plain, Opacus with hooks (per-sample gradients), Opacus with ghost
clipping. Each runs in a process of its own; the processes take turns, one step at a time, so that whatever else the
machine does hits all alike. Medians; ratios to the plain step of the same framework, of wall time and of processor
time, which other work on the machine disturbs less (with OMP_NUM_THREADS=1 least of all: threads that wait for a thread
that was put aside count as working). Memory is the peak resident memory of that process above what its imports take,
over that of the plain step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
# What Opacus can run of each row (see torch_workloads.py).
ROWS = {
    "encoder": ("hooks", "ghost"),
    "encoder-per-layer": ("hooks",),
    "encoder-T512": ("hooks", "ghost"),
    "lora": ("hooks", "ghost"),
    "bitfit": ("hooks", "ghost"),
    "resnet20": ("hooks", "ghost"),
    "lstm": ("hooks", "ghost"),
    "embedding-1e4": ("hooks", "ghost"),
    "embedding-1e6": ("ghost",),
}
# Threads of a pool look for work for up to 0.2 s after the last; the next process should not pay for that.
PAUSE = 0.3


class Worker:
    """A process that runs one kind of step whenever it is asked to."""

    def __init__(self, command: list[str], errors: IO[str]):
        self._errors = errors
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._next("ready")
        self.wall: list[float] = []
        self.processor: list[float] = []

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        took = json.loads(self._next("{"))
        self.wall.append(took["wall"])
        self.processor.append(took["processor"])

    def finish(self) -> float:
        """Ends the process; its peak memory in MiB."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        resident = json.loads(self._next("{"))["resident"]
        self._process.wait()
        return resident

    def _next(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        self._errors.seek(0)
        raise RuntimeError(f"{self._process.args} ended:\n{self._errors.read()[-2000:]}")


def measure(row: str, peer: str, repetitions: int, seconds: float) -> list[dict]:
    commands = {
        "Paddle, plain": [sys.executable, str(HERE / "paddle_worker.py"), row, "plain"],
        "paddle_privacy": [sys.executable, str(HERE / "paddle_worker.py"), row, "private"],
        "PyTorch, plain": [peer, str(HERE / "opacus_worker.py"), row, "plain"],
    }
    for mode in ROWS[row]:
        commands[f"Opacus, {mode}"] = [peer, str(HERE / "opacus_worker.py"), row, mode]
    with tempfile.TemporaryFile("w+") as errors:
        workers = {name: Worker(command, errors) for name, command in commands.items()}
        resident = _take_turns(workers, repetitions, seconds)
    return _compare(row, workers, resident)


def _take_turns(workers: dict[str, Worker], repetitions: int, seconds: float) -> dict[str, float]:
    """Steps of all workers, each time another one first; the peak memory of each in MiB."""
    end = time.monotonic() + seconds
    order = list(workers)
    for turn in range(repetitions):
        if turn >= 3 and time.monotonic() > end:
            break
        for name in order:
            time.sleep(PAUSE)
            workers[name].step()
        order = order[1:] + order[:1]
    return {name: worker.finish() for name, worker in workers.items()}


def _compare(row: str, workers: dict[str, Worker], resident: dict[str, float]) -> list[dict]:
    found = []
    for name, worker in workers.items():
        base = "Paddle, plain" if name in ("Paddle, plain", "paddle_privacy") else "PyTorch, plain"
        plain = workers[base]
        ratios = sorted(a / b for a, b in zip(worker.wall, plain.wall))
        quarter = len(ratios) // 4
        found.append(
            {
                "row": row,
                "step": name,
                "rounds": len(worker.wall),
                "ms": 1e3 * statistics.median(worker.wall),
                "processor_ms": 1e3 * statistics.median(worker.processor),
                "time": statistics.median(worker.wall) / statistics.median(plain.wall),
                "lower": ratios[quarter],
                "upper": ratios[-1 - quarter],
                "processor": statistics.median(worker.processor) / statistics.median(plain.processor),
                "mib": resident[name],
                "memory": resident[name] / resident[base],
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--python", required=True, metavar="PATH", help="the interpreter that has torch and opacus")
    parser.add_argument("--repetitions", type=int, default=9, help="rounds of a row (default 9)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round of a row after so long; at least 3")
    parser.add_argument("--json", metavar="PATH", help="append what is found, one line a step")
    options = parser.parse_args()
    unknown = sorted(set(options.rows) - set(ROWS))
    if unknown:
        parser.error(f"unknown rows {unknown}; choose from {', '.join(ROWS)}")
    columns = ("row", "step", "ms", "time (quartiles)", "processor ms", "processor time", "MiB", "memory")
    print("| " + " | ".join(columns) + " |\n" + len(columns) * "|---" + "|")
    for row in options.rows or ROWS:
        for one in measure(row, options.python, options.repetitions, options.seconds):
            spread = "" if one["step"].endswith("plain") else f" ({one['lower']:.2f}–{one['upper']:.2f})"
            wall = f"{one['ms']:.0f} | {one['time']:.2f}{spread}"
            processor = f"{one['processor_ms']:.0f} | {one['processor']:.2f}"
            print(
                f"| {row} | {one['step']} | {wall} | {processor} | {one['mib']:.0f} | {one['memory']:.2f} |", flush=True
            )
            if options.json:
                with Path(options.json).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
