"""Predicts the step of a data-parallel private run, and checks the prediction against real processes.

    python benchmarks/scaling.py                                  # the table of docs/scaling.md
    python benchmarks/scaling.py --check                          # predicted against measured 1, 2 and 4 processes

The model, for P trained parameters, b rows a rank of T tokens, W ranks:

    compute   FLOPs(b) / speed                  the same for every W: each rank has rows of its own
    exchange  2(W-1)/W · 4P / bandwidth + 2(W-1) · latency      a ring all-reduce of float32
    step      compute · max(1, W / cores) + exchange            cores: those that the ranks share, on one machine

The exchange is not overlapped with the backward pass: the sum is known, and its noise can be added, only after it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

FLOAT32 = 4


@dataclass(frozen=True)
class Link:
    """bandwidth in bytes/s of one rank's link, latency in seconds a message."""

    bandwidth: float
    latency: float


def exchange_bytes(trained: int, world: int) -> float:
    """Bytes that one rank sends in a step: a ring all-reduce of the clipped sums (the agreement adds 24)."""
    return 2 * (world - 1) / world * FLOAT32 * trained + 24 * (world > 1)


def exchange_seconds(trained: int, world: int, link: Link) -> float:
    return exchange_bytes(trained, world) / link.bandwidth + 2 * (world - 1) * link.latency


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
                f"exchange {1e3 * exchange_seconds(trained, world, link):.2f} ms | compute of 8 rows "
                f"{1e3 * compute:.2f} ms | equal at {rows:.1f} rows a rank"
            )


def fitted(link_ms: list[float], elements: tuple[int, ...], world: int) -> Link:
    """Bandwidth and latency from two all-reduces of different sizes."""
    (small, large), (n, m) = (1e-3 * t for t in link_ms), elements
    bandwidth = 2 * (world - 1) / world * FLOAT32 * (m - n) / max(large - small, 1e-9)
    latency = max(0.0, small - 2 * (world - 1) / world * FLOAT32 * n / bandwidth) / (2 * (world - 1))
    return Link(bandwidth, latency)


def check(cores: int, arguments: list[str]) -> None:
    from distributed import LINK_ELEMENTS, start

    measured = {world: start(world, arguments) for world in (1, 2, 4)}
    link = fitted(measured[2]["link_ms"], LINK_ELEMENTS, 2)
    for world, found in measured.items():
        compute = measured[1]["private_ms"] * max(1.0, world / cores)
        predicted = compute + 1e3 * exchange_seconds(found["parameters"], world, link)
        line = {"world": world, "predicted_ms": predicted, "measured_ms": found["private_ms"]}
        line["measured_over_predicted"] = found["private_ms"] / predicted
        print(json.dumps({name: round(value, 3) for name, value in line.items()}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cores", type=int, default=2, help="cores that the ranks of --check share")
    options, others = parser.parse_known_args()
    if options.check:
        check(options.cores, others)
    else:
        table()
