"""What privacy costs a data-parallel step: against paddle.DataParallel on W processes, and against one process.

    python benchmarks/distributed.py [--worlds 1 2] [--layers 4] [--width 512] [--batch 32] [--steps 30]

Every process takes `batch` rows, so the work of one process is the same for every W. AdamW everywhere. Plain, private
and sharded private steps alternate in blocks, so that a busy machine slows all of them. Prints a JSON line for each W:

    plain_ms, private_ms, sharded_ms
                           medians of a step (forward, backward, communication, update)
    private_over_plain     private_ms / plain_ms at this W; sharded_over_plain likewise
    scaling_ratio          private_over_plain at this W over that at W = 1: what being private *and* distributed costs
                           beyond being private; the target is at most 1.15. sharded_scaling_ratio likewise
    exchange_ms            median of the private step's collectives alone (agreement and all-reduce), waiting included
    link_ms                medians of one all-reduce of each of LINK_ELEMENTS float32, for benchmarks/scaling.py
    bytes_ratio            bytes that collectives carry in a private step over those of plain data parallelism (an
                           all-reduce of 4 bytes a parameter); sharded_bytes_ratio likewise
    sharded_state_ratio    bytes of moments on rank 0 over those of all parameters
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any, Callable

LINK_ELEMENTS = (100_000, 1_000_000)


def measure(options: argparse.Namespace, world: int) -> dict[str, Any]:
    import paddle
    import paddle.distributed as dist
    from paddle import nn

    from paddle_privacy import DPAdamW

    if world > 1:
        dist.init_parallel_env()
    paddle.seed(0)

    def net() -> nn.Layer:
        layers: list[nn.Layer] = []
        for _ in range(options.layers):
            layers += [nn.Linear(options.width, options.width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(options.width, 10))

    def trainer(kind: str) -> tuple[Callable[[], None], Any]:
        model = net()
        used = paddle.DataParallel(model) if world > 1 else model
        if kind == "plain":
            optimizer: Any = paddle.optimizer.AdamW(1e-4, parameters=used.parameters())
        else:
            optimizer = DPAdamW(
                parameters=used.parameters(),
                learning_rate=1e-4,
                clip_norm=1.0,
                noise_multiplier=1.0,
                batch_size=options.batch * world,
                dataset_size=10**6,
                sharding_stage=2 if kind == "sharded" else 0,
            )
        x = paddle.randn([options.batch, options.width])
        y = paddle.randint(0, 10, [options.batch])

        def step() -> None:
            nn.functional.cross_entropy(used(x), y).backward()
            optimizer.step()
            optimizer.clear_grad()

        return step, optimizer

    kinds = ["plain", "private"] + ["sharded"] * (world > 1)
    steps, optimizers = {}, {}
    for kind in kinds:
        steps[kind], optimizers[kind] = trainer(kind)
    optimizer = optimizers["private"]
    exchange: list[float] = []
    ranks = optimizer._shared.ranks if world > 1 else None
    if ranks is not None:
        for name in ("gather", "sum_"):
            setattr(ranks, name, _timed(getattr(ranks, name), exchange))
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for block in range(options.steps // 5 + 1):
        for kind in kinds:
            for _ in range(5):
                if world > 1:
                    dist.barrier()
                begin = time.perf_counter()
                steps[kind]()
                if block:  # the first block warms up
                    times[kind].append(time.perf_counter() - begin)
    parameters = sum(int(p.size) for p in optimizer._clipped_sum.parameters)
    found: dict[str, Any] = {"world": world, "parameters": parameters}
    found.update({f"{kind}_ms": 1e3 * statistics.median(times[kind]) for kind in kinds})
    found["private_each_ms"] = [1e3 * t for t in times["private"]]
    if ranks is not None:
        found["link_ms"] = [1e3 * _link(paddle.zeros([n])) for n in LINK_ELEMENTS]
        taken = optimizer.spending.steps
        each = len(exchange) // taken
        found["exchange_ms"] = 1e3 * statistics.median(
            sum(exchange[i : i + each]) for i in range(5 * each, each * taken, each)
        )
        for kind, prefix in (("private", ""), ("sharded", "sharded_")):
            moved = optimizers[kind]._shared.ranks.bytes_moved
            found[f"{prefix}bytes_ratio"] = moved / taken / (2 * 4 * parameters)
        held, all_of_them = (
            sum(int(t.size) for kind in optimizers[name]._accumulators.values() for t in kind.values())
            for name in ("sharded", "private")
        )
        found["sharded_state_ratio"] = held / all_of_them
    return found


def _link(tensor: Any) -> float:
    import paddle.distributed as dist

    times: list[float] = []
    for _ in range(15):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _timed(method: Callable, times: list[float]) -> Callable:
    def timed(*arguments: Any) -> Any:
        begin = time.perf_counter()
        result = method(*arguments)
        times.append(time.perf_counter() - begin)
        return result

    return timed


def start(world: int, arguments: list[str]) -> dict[str, Any]:
    """What rank 0 of `world` processes measured, with the given words of the command line."""
    sockets = [socket.socket() for _ in range(world)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    endpoints = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    processes = []
    for rank in range(world):
        surroundings = {
            **os.environ,
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(world),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_DISTRI_BACKEND": "gloo",
            "OMP_NUM_THREADS": "1",
        }
        words = [sys.executable, "-W", "ignore", __file__, *arguments, "--as-rank", str(world)]
        # The other ranks print what rank 0 prints.
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(words, env=surroundings, stdout=out, stderr=subprocess.DEVNULL, text=True))
    output = processes[0].communicate()[0]
    if any(process.wait() for process in processes):
        raise SystemExit(f"a rank of {world} failed")
    return json.loads(output.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32, help="rows a process")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(options, options.as_rank)))
        return
    alone: float | None = None
    for world in options.worlds:
        found = start(world, sys.argv[1:])
        del found["private_each_ms"]  # for benchmarks/scaling.py
        for kind, ratio in (("private", "scaling_ratio"), ("sharded", "sharded_scaling_ratio")):
            if f"{kind}_ms" not in found:
                continue
            over = found[f"{kind}_over_plain"] = found[f"{kind}_ms"] / found["plain_ms"]
            if world == 1:
                alone = over
            elif alone is not None:
                found[ratio] = over / alone
        print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in found.items()}), flush=True)


if __name__ == "__main__":
    main()
