"""Predicts the step of a data-parallel private run, and checks the prediction against real processes.

    python benchmarks/scaling.py                                  # the table of docs/scaling.md
    python benchmarks/scaling.py --check                          # predicted against measured 1, 2 and 4 processes
    python benchmarks/scaling.py --rows                           # what N costs the sampler and the ledger

The model, for P trained parameters, b rows a rank of T tokens, W ranks:

    compute   FLOPs(b) / speed                  the same for every W: each rank has rows of its own
    exchange  2(W-1)/W · 4P / bandwidth + 2(W-1) · latency      a ring all-reduce of float32
    step      compute + exchange

On one machine with fewer cores than ranks, these take turns; see :func:`predicted_ms`.

The exchange is not overlapped with the backward pass: the sum is known, and its noise can be added, only after it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

FLOAT32 = 4


@dataclass(frozen=True)
class Link:
    """bandwidth in bytes/s of one rank's link, latency in seconds a message."""

    bandwidth: float
    latency: float


def exchange_bytes(trained: int, world: int) -> float:
    """Bytes that one rank sends in a step: a ring all-reduce of the clipped sums (the agreement adds 24).

    With sharded states the same on average: the sums go to their owners, and the new parameters come back.
    """
    return 2 * (world - 1) / world * FLOAT32 * trained + 24 * (world > 1)


def exchange_seconds(trained: int, world: int, link: Link) -> float:
    return exchange_bytes(trained, world) / link.bandwidth + 2 * (world - 1) * link.latency


def held_bytes(parameters: int, trained: int, world: int, sharded: bool) -> float:
    """Bytes of parameters, clipped sums and Adam's moments on a rank, in float32; activations come on top."""
    return FLOAT32 * (parameters + trained + 2 * trained / (world if sharded else 1))


def step_flops(parameters: int, trained: int, rows: int, tokens: int, width: int) -> float:
    """FLOPs of a private step on one rank, dense layers: forward 2, activation gradients 2, book-keeping sum 2 a
    weight and token, and ghost norms 4T² a token pair and layer width (or a per-sample gradient, where cheaper)."""
    positions = rows * tokens
    layers_in_width = trained / width  # Σ (d + p)/2 over layers of width d = p
    norms = min(2.0 * tokens * positions * 2 * layers_in_width, 2.0 * positions * trained)
    return 4.0 * parameters * positions + 2.0 * trained * positions + norms


def crossover_rows(
    parameters: int, trained: int, tokens: int, width: int, world: int, link: Link, flops: float
) -> float:
    """Rows a rank at which compute and exchange take equally long: with fewer, communication dominates."""
    return exchange_seconds(trained, world, link) / (step_flops(parameters, trained, 1, tokens, width) / flops)


def table() -> None:
    machines = {"8 GPUs, NVLink": (Link(200e9, 1e-5), 200e12), "64 GPUs, 25 GB/s": (Link(25e9, 2e-5), 200e12)}
    models = {
        "ERNIE 3.0 medium, full (75 M)": (75_000_000, 75_000_000, 128, 768),
        "7 B, full": (7_000_000_000, 7_000_000_000, 512, 4096),
        "7 B, LoRA (20 M)": (7_000_000_000, 20_000_000, 512, 4096),
    }
    for machine, (link, flops) in machines.items():
        world = int(machine.split()[0])
        for model, (parameters, trained, tokens, width) in models.items():
            rows = crossover_rows(parameters, trained, tokens, width, world, link, flops)
            compute = step_flops(parameters, trained, 8, tokens, width) / flops
            print(
                f"{machine} | {model} | sent a rank {exchange_bytes(trained, world) / 1e6:.0f} MB | "
                f"held {held_bytes(parameters, trained, world, False) / 1e9:.1f} GB, "
                f"sharded {held_bytes(parameters, trained, world, True) / 1e9:.1f} GB | "
                f"exchange {1e3 * exchange_seconds(trained, world, link):.2f} ms | compute of 8 rows "
                f"{1e3 * compute:.2f} ms | equal at {rows:.1f} rows a rank"
            )


def fitted(link_ms: list[float], elements: tuple[int, ...], world: int) -> Link:
    """Bandwidth and latency from two all-reduces of different sizes."""
    (small, large), (n, m) = (1e-3 * t for t in link_ms), elements
    bandwidth = 2 * (world - 1) / world * FLOAT32 * (m - n) / max(large - small, 1e-9)
    latency = max(0.0, small - 2 * (world - 1) / world * FLOAT32 * n / bandwidth) / (2 * (world - 1))
    return Link(bandwidth, latency)


def predicted_ms(
    alone: Sequence[float], crowded: Sequence[float], trained: int, world: int, cores: int, link: Link
) -> float:
    """The median step of `world` ranks on one machine of `cores` cores.

    Ranks wait for the slowest in every step: of W independent steps, the slowest has as its median the quantile
    2^(-1/W) of one step.

    Args:
        alone: ms of the steps of one process that has the machine to itself.
        crowded: ms of the same steps while `cores` processes run them side by side without a word to each other: they
            share caches and memory, and whatever else runs here interrupts them.
        trained: parameters whose sums are exchanged.
        world: number of ranks.
        cores: cores that they share.
        link: of two processes on this machine. Through loopback the exchange is work of the cores as well (copies and
            additions), so more ranks than cores share it out like everything else.
    """
    compute = float(np.quantile(alone if world == 1 else crowded, 0.5 ** (1.0 / world)))
    return max(1.0, world / cores) * (compute + 1e3 * exchange_seconds(trained, world, link))


def check(cores: int, arguments: list[str]) -> None:
    from distributed import LINK_ELEMENTS, start

    with ThreadPoolExecutor(cores) as pool:
        beside = list(pool.map(lambda _: start(1, arguments), range(cores)))
    crowded = [t for found in beside for t in found["private_each_ms"]]
    measured = {world: start(world, arguments) for world in (1, 2, 4)}
    link = fitted(measured[2]["link_ms"], LINK_ELEMENTS, 2)
    median, slow = np.quantile(crowded, [0.5, 0.84])
    print(f"side by side: median {median:.1f} ms, of four the slowest {slow:.1f} ms")
    print(f"link: {link.bandwidth / 1e9:.2f} GB/s, {1e3 * link.latency:.2f} ms a message")
    for world, found in measured.items():
        alone = measured[1]["private_each_ms"]
        predicted = predicted_ms(alone, crowded, found["parameters"], world, cores, link)
        line = {"world": world, "predicted_ms": predicted, "measured_ms": found["private_ms"]}
        line["measured_over_predicted"] = found["private_ms"] / predicted
        print(json.dumps({name: round(value, 3) for name, value in line.items()}), flush=True)


def rows() -> None:
    """What N costs: the draw of a share, the sampler's memory, and a line of the ledger."""
    import tempfile
    import time
    import tracemalloc
    from pathlib import Path

    from paddle.io import Dataset, DistributedBatchSampler

    from paddle_privacy import PoissonBatchSampler
    from paddle_privacy.accounting.events import Gaussian, PoissonSampled
    from paddle_privacy.ledger import REQUIRED_HEADER, Ledger
    from paddle_privacy.verify.chain import read_ledger

    def peak(batches: Iterable[Any], take: int) -> tuple[float, float]:
        """ms a batch, and the most memory held in MB; each in a pass of its own, as tracing slows."""
        begin = time.perf_counter()
        for _ in itertools.islice(iter(batches), take):
            pass
        taken = time.perf_counter() - begin
        tracemalloc.start()
        for _ in itertools.islice(iter(batches), take):
            pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return 1e3 * taken / take, most / 1e6

    class Numbers(Dataset):
        def __init__(self, rows: int):
            self.rows = rows

        def __len__(self) -> int:
            return self.rows

        def __getitem__(self, row: int) -> int:
            return row

    for count in (10**6, 10**9):
        sampler = PoissonBatchSampler(num_rows=count, batch_size=4096, steps=200, num_replicas=64, rank=7)
        line = {"rows": count, "poisson": peak(sampler, 200)}
        if count == 10**6:
            own = DistributedBatchSampler(Numbers(count), 64, num_replicas=64, rank=7, shuffle=True)
            line["DistributedBatchSampler"] = peak(own, 1)
        print({name: v if name == "rows" else f"{v[0]:.3f} ms, {v[1]:.2f} MB" for name, v in line.items()}, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ledger, lines = Ledger(Path(folder) / "ledger.jsonl"), 5000
        ledger.open({**dict.fromkeys(REQUIRED_HEADER), "world_size": 64})
        event = PoissonSampled(4096 / 10**9, Gaussian(1.0)).to_dict()
        before = ledger.path.stat().st_size
        begin = time.perf_counter()
        for step in range(lines):
            ledger.append(event, 1.0, step)
        seconds = time.perf_counter() - begin
        ledger.close()
        size = (ledger.path.stat().st_size - before) / lines
        begin = time.perf_counter()
        read_ledger(ledger.path)
        reading = time.perf_counter() - begin
        print(
            f"ledger: {size:.0f} bytes and {1e3 * seconds / lines:.3f} ms an update, {1e6 * reading / lines:.0f} us to "
            "verify one"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--cores", type=int, default=2, help="cores that the ranks of --check share")
    options, others = parser.parse_known_args()
    if options.check:
        check(options.cores, others)
    elif options.rows:
        rows()
    else:
        table()
