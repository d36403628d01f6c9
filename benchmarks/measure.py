"""How steps are timed and how their memory is measured.

Time: the kinds of step take turns in one process, so that whatever else the machine does hits all of them alike; what
counts is the ratio of medians, with the quartiles of the ratios of neighbouring runs, and the same ratio of processor
time, which other work on the machine disturbs less. Memory: what Paddle's allocator handed out at its peak, and the
peak of resident memory above what importing takes; each kind of step in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import paddle
from floors import Rates
from workloads import Row

MIB = 2.0**20
# Steps of one backward pass that stand for the `pieces` of a logical batch: enough to time, less than all of them.
SHORT = 16
Step = Callable[[], None]


def optimizer_for(row: Row, trained: list[paddle.Tensor], private: bool) -> paddle.optimizer.Optimizer:
    """SGD, private or plain: of all optimizers the one beside whose update the noise shows most."""
    if not private:
        return paddle.optimizer.SGD(learning_rate=1e-3, parameters=trained)
    from paddle_privacy import DPSGD

    return DPSGD(
        learning_rate=1e-3,
        parameters=trained,
        clip_norm=1.0,
        noise_multiplier=1.0,
        batch_size=row.batch,
        sampling="none",
        clipping=row.clipping,
    )


def stepper(row: Row, kind: str) -> Step:
    """One step of `row`: "plain"; "private"; or, for a logical batch, "short" ones or "two" pieces.

    "short": :data:`SHORT` private steps of one backward pass each. "two": one private step of two backward passes,
    which already holds a sum of clipped gradients while the next piece runs.
    """
    paddle.seed(0)
    model, loss = row.make()
    model.train()
    optimizer = optimizer_for(row, [p for p in model.parameters() if not p.stop_gradient], kind != "plain")
    backwards, steps = {"short": (1, SHORT), "two": (2, 1)}.get(kind, (row.pieces, 1))

    def step() -> None:
        for _ in range(steps):
            for _ in range(backwards):
                loss(model).backward()
            optimizer.step()
            optimizer.clear_grad()

    return step


def baseline_kind(row: Row) -> tuple[str, float]:
    """The kind of step that `row` is compared with, and how many of them have the samples of one private step."""
    return ("plain", 1.0) if row.pieces == 1 else ("short", row.pieces / SHORT)


@dataclass(frozen=True)
class Timing:
    """Seconds of a step and ratios to the baseline's: of medians, quartiles over neighbours, and of processor time."""

    baseline: float
    private: float
    ratio: float
    lower: float
    upper: float
    processor: float


def time_steps(baseline: Step, private: Step, repetitions: int, warm_up: int = 1, share: float = 1.0) -> Timing:
    """Medians over interleaved runs; each repetition swaps which of the two goes first.

    `share` baseline steps have the samples of one private step; what the baseline takes is multiplied by it.
    """
    wall: dict[Step, list[float]] = {baseline: [], private: []}
    processor: dict[Step, list[float]] = {baseline: [], private: []}
    for step in wall:
        for _ in range(warm_up):
            step()
    for turn in range(repetitions):
        for step in (baseline, private) if turn % 2 == 0 else (private, baseline):
            start, start_processor = time.perf_counter(), time.process_time()
            step()
            times = share if step is baseline else 1.0
            wall[step].append(times * (time.perf_counter() - start))
            processor[step].append(times * (time.process_time() - start_processor))
    ratios = sorted(d / p for d, p in zip(wall[private], wall[baseline]))
    quarter = len(ratios) // 4
    middle = statistics.median
    return Timing(
        middle(wall[baseline]),
        middle(wall[private]),
        middle(wall[private]) / middle(wall[baseline]),
        ratios[quarter],
        ratios[-1 - quarter],
        middle(processor[private]) / middle(processor[baseline]),
    )


@dataclass(frozen=True)
class Memory:
    """MiB: peaks that Paddle's allocator handed out, and resident memory above importing.

    `first` is of the first step, in which a private one also looks at the model's structure, `allocated` of a usual
    step, `forward` of a forward pass alone.
    """

    allocated: float
    first: float
    forward: float
    resident: float
    parameters: int


def allocated_peak() -> float:
    return paddle.base.core.host_memory_stat_peak_value("Allocated", 0) / MIB


def allocated_now() -> float:
    return paddle.base.core.host_memory_stat_current_value("Allocated", 0) / MIB


def reset_allocated_peak() -> None:
    paddle.base.core.host_memory_stat_reset_peak_value("Allocated", 0)


def resident_peak() -> float:
    # Not getrusage: its maximum is inherited from the parent process.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def memory_here(row: Row, kind: str) -> Memory:
    """To be run in a process of its own: resident peaks do not go down again."""
    if kind != "plain":
        import paddle_privacy  # noqa: F401
    imported = resident_peak()
    forward = 0.0
    if kind == "plain":
        paddle.seed(0)
        model, loss = row.make()
        held = loss(model)
        forward = allocated_peak()
        del model, loss, held
        reset_allocated_peak()
    step = stepper(row, kind)
    step()
    first = usual = allocated_peak()
    if row.pieces == 1:
        step()
        reset_allocated_peak()
        step()
        usual = allocated_peak()
    parameters = sum(p.size for p in row.make()[0].parameters())
    return Memory(usual, first, forward, resident_peak() - imported, parameters)


def memory_apart(name: str, kind: str) -> Memory:
    """:func:`memory_here` in a process of its own."""
    script = Path(__file__).with_name("step.py")
    command = [sys.executable, str(script), "--memory-of", name, kind]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Memory(**json.loads(out.strip().splitlines()[-1]))


def print_memory(row: Row, kind: str) -> None:
    print(json.dumps(asdict(memory_here(row, kind))))


def machine_rates() -> Rates:
    """What this machine does at best: a product of an encoder's size, passes over 64 MiB, noise on 16 MiB."""
    from paddle_privacy.noise import NoiseGenerator

    a, b = paddle.randn([2048, 768]), paddle.randn([768, 1536])
    large = paddle.zeros([1 << 24])
    noise, noised = NoiseGenerator(), paddle.zeros([1 << 22])
    # The update reads and writes every value anyway; the noise is what comes on top.
    pass_over = _best(lambda: noised.scale_(1.0))
    return Rates(
        multiply_adds=2048 * 768 * 1536 / _best(lambda: paddle.matmul(a, b)),
        bytes=2 * 4 * large.size / _best(lambda: large.scale_(1.0)),
        noise=noised.size / max(_best(lambda: noise.add_noise([noised], 1.0)) - pass_over, 1e-9),
    )


def _best(run: Callable[[], object], repetitions: int = 7) -> float:
    run()
    found = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)
