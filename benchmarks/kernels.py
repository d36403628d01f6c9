"""Each native operator against the best composition of Paddle's, and against the machine's memory bandwidth.

    OMP_NUM_THREADS=1 python benchmarks/kernels.py            # all
    OMP_NUM_THREADS=2 python benchmarks/kernels.py noise clip # some

Contenders take turns, and the best of the turns counts, so that a neighbour on the machine disturbs all alike. The
bandwidth is that of copying a large array with as many threads as OMP_NUM_THREADS says (bytes read plus bytes
written); a kernel's traffic is what it must read and write at least, given how often it passes over its input.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import paddle

from paddle_privacy import kernels
from paddle_privacy.kernels import native
from paddle_privacy.kernels.fused_update import fused_update
from paddle_privacy.noise import NoiseGenerator

Contenders = dict[str, Callable[[], object]]
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))


def best_times(contenders: Contenders, turns: int) -> dict[str, float]:
    """Seconds of the fastest turn of each."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(turns):
        for name, call in contenders.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def copy_bandwidth(turns: int) -> float:
    """Bytes a second, read and written."""
    size = 1 << 26
    source, target = np.ones(size, dtype=np.float32), np.zeros(size, dtype=np.float32)
    bounds = [size * i // THREADS for i in range(THREADS + 1)]
    with ThreadPoolExecutor(THREADS) as pool:

        def copy() -> None:
            def part(i: int) -> None:
                np.copyto(target[bounds[i] : bounds[i + 1]], source[bounds[i] : bounds[i + 1]])

            list(pool.map(part, range(THREADS)))

        return 2 * source.nbytes / best_times({"copy": copy}, turns)["copy"]


def show(title: str, times: dict[str, float], bandwidth: float, traffic: float = 0, per_value: int = 0) -> None:
    own, others = times["native"], {name: t for name, t in times.items() if name != "native"}
    rival = min(others, key=lambda name: others[name])
    parts = [f"{title:44} {own * 1e3:9.2f} ms"]
    if per_value:
        parts.append(f"{own / per_value * 1e9:6.2f} ns/value")
    if traffic:
        parts.append(f"{100 * traffic / own / bandwidth:4.0f}% of the copy's bandwidth")
    parts.append(f"{others[rival] / own:5.2f}x {rival} ({others[rival] * 1e3:.2f} ms)")
    print("  ".join(parts), flush=True)


def noise(bandwidth: float, turns: int) -> None:
    count = 4_000_000
    x = paddle.zeros([count])
    for isa in ("baseline", "avx2", "avx512"):
        for hardening in ("none", "grid", "sum"):
            generator = NoiseGenerator(hardening=hardening)
            os.environ["PADDLE_PRIVACY_ISA"] = isa
            contenders: Contenders = {
                "native": lambda g=generator: g.add_noise([x], 1.0),
                "x + paddle.randn": lambda: x.add_(paddle.randn([count])),
            }
            times = best_times(contenders, turns)
            show(f"add noise, {isa}, hardening {hardening}", times, bandwidth, per_value=count)
    os.environ.pop("PADDLE_PRIVACY_ISA")


def step(bandwidth: float, turns: int) -> None:
    shapes = [[384, 1536]] * 20
    count = 20 * 384 * 1536
    opt = paddle.optimizer
    for kind, moments in ((opt.SGD, 0), (opt.Momentum, 1), (opt.Adam, 2), (opt.AdamW, 2)):
        parameters = [paddle.create_parameter(shape, "float32") for shape in shapes]
        sums = [paddle.randn(shape) for shape in shapes]
        optimizer = kind(0.01, parameters=parameters)
        generator = NoiseGenerator()

        def composed(parameters=parameters, sums=sums, optimizer=optimizer) -> None:
            for parameter, total in zip(parameters, sums):
                parameter.grad = (total + paddle.randn(total.shape)) / 64.0
            optimizer.step()
            optimizer.clear_grad()

        contenders: Contenders = {
            "native": lambda o=optimizer, p=parameters, s=sums, g=generator: fused_update(o, p, s, g, 1.0, 64.0),
            "Paddle operators": composed,
        }
        traffic = 4 * count * (3 + 2 * moments)
        show(f"noise step, {kind.__name__}, 11.8M parameters", best_times(contenders, turns), bandwidth, traffic)


def clip(bandwidth: float, turns: int) -> None:
    for batch, columns in ((64, 1_000_000), (64, 100_000), (256, 10_000)):
        x = paddle.randn([batch, columns])
        generator = NoiseGenerator()

        def own(x=x, generator=generator) -> None:
            sums, _, _ = kernels.clip_and_sum([x], 1.0)
            generator.add_noise(sums, 1.0)

        def composed(x=x, columns=columns) -> None:
            # squared_l2_norm is the one Paddle reduction that stays exact; it takes a row at a time.
            norms = paddle.stack([paddle._C_ops.squared_l2_norm(row).reshape([]) for row in x]).sqrt()
            factors = paddle.clip(1.0 / norms, max=1.0)
            paddle.matmul(factors.unsqueeze(0), x).squeeze(0) + paddle.randn([columns])

        def plain(x=x, columns=columns) -> None:
            factors = paddle.clip(1.0 / paddle.linalg.norm(x, axis=1), max=1.0)
            paddle.matmul(factors.unsqueeze(0), x).squeeze(0) + paddle.randn([columns])

        contenders: Contenders = {"native": own, "exact composition": composed, "linalg.norm composition": plain}
        times = best_times(contenders, turns)
        show(f"clip, sum, noise, {batch} x {columns}", times, bandwidth, 2 * 4 * batch * columns)


def rows(bandwidth: float, turns: int) -> None:
    x = paddle.randn([64, 500_000])
    c = paddle.rand([64])
    contenders: Contenders = {
        "native": lambda: kernels.row_squared_norms(x),
        "(x * x).sum(1), inexact": lambda: (x * x).sum(axis=1),
        "squared_l2_norm by row": lambda: [paddle._C_ops.squared_l2_norm(row) for row in x],
    }
    show("row norms, 64 x 500000", best_times(contenders, turns), bandwidth, 4 * x.size)
    contenders = {
        "native": lambda: kernels.weighted_row_sum(x, c),
        "matmul": lambda: paddle.matmul(c.unsqueeze(0), x),
    }
    show("weighted sum, 64 x 500000", best_times(contenders, turns), bandwidth, 4 * x.size)


def ghost(bandwidth: float, turns: int) -> None:
    for batch, steps, d, p in ((16, 128, 384, 384), (16, 128, 384, 1536), (16, 128, 312, 312), (16, 512, 768, 768)):
        a, g = paddle.randn([batch, steps, d]), paddle.randn([batch, steps, p])

        def grams(a=a, g=g) -> None:
            product = paddle.matmul(a, a, transpose_y=True) * paddle.matmul(g, g, transpose_y=True)
            product.sum(axis=[1, 2])

        def formed(a=a, g=g) -> None:
            paddle.matmul(a, g, transpose_x=True).square().sum(axis=[1, 2])

        contenders: Contenders = {
            "native": lambda a=a, g=g: kernels.ghost_squared_norm(a, g),
            "two Gram matrices": grams,
            "formed gradient": formed,
        }
        show(f"ghost norm, B={batch} T={steps} d={d} p={p}", best_times(contenders, turns), bandwidth)


def layers(bandwidth: float, turns: int) -> None:
    batch, steps, width, vocabulary = 16, 128, 384, 18_000
    ids = paddle.randint(0, vocabulary, [batch, steps])
    g, x, c = paddle.randn([batch, steps, width]), paddle.randn([batch, steps, width]), paddle.rand([batch])
    contenders: Contenders = {
        "native": lambda: kernels.embedding_squared_norm(ids, g),
        "unique and index_add": lambda: kernels.reference.embedding_squared_norm(ids, g),
    }
    show("embedding norm, B=16 T=128 D=384", best_times(contenders, turns), bandwidth, 4 * g.size)
    contenders = {
        "native": lambda: kernels.embedding_weighted_sum(ids, g, c, vocabulary),
        "index_add": lambda: kernels.reference.embedding_weighted_sum(ids, g, c, vocabulary),
    }
    traffic = 4 * (g.size + vocabulary * width)
    show("embedding sum, V=18000", best_times(contenders, turns), bandwidth, traffic)

    def layer_norm() -> None:
        (paddle.nn.functional.layer_norm(x, width) * g).sum(axis=1)
        g.sum(axis=1)

    contenders = {
        "native": lambda: kernels.norm_layer_sums(x, g, 1e-5, centered=True, with_bias=True),
        "layer_norm, product, sums": layer_norm,
    }
    show("LayerNorm sums, B=16 T=128 D=384", best_times(contenders, turns), bandwidth, 8 * g.size)


BENCHMARKS = {"noise": noise, "step": step, "clip": clip, "rows": rows, "ghost": ghost, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="default: all")
    parser.add_argument("--turns", type=int, default=10)
    arguments = parser.parse_args()
    print(f"operators: {native.state().reason}; {THREADS} thread(s); Paddle {paddle.__version__}")
    bandwidth = copy_bandwidth(arguments.turns)
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s")
    for name in arguments.names or BENCHMARKS:
        BENCHMARKS[name](bandwidth, arguments.turns)


if __name__ == "__main__":
    main()
