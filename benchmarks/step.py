"""Time and peak memory of one private step against one plain Paddle step of the same model.

    OMP_NUM_THREADS=2 python benchmarks/step.py                 # every row
    OMP_NUM_THREADS=2 python benchmarks/step.py encoder lstm    # some rows
    OMP_NUM_THREADS=2 python benchmarks/step.py --quick         # fewer repetitions, small rows

Time: both steps run interleaved in one process on two copies of the model; medians, the ratio's spread over
repetitions, and the ratio of processor time, which other work on the machine disturbs less. Memory: each kind in a
process of its own; peak of what Paddle's allocator handed out, and peak resident memory above what importing takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import paddle
from paddle import nn

Made = tuple[nn.Layer, Callable[[nn.Layer], paddle.Tensor]]


@dataclass(frozen=True)
class Row:
    """One line of the table: how to make a model with its loss, and which clipping and batch it runs with."""

    make: Callable[[], Made]
    batch: int
    clipping: str = "flat"
    plain_parameters: Callable[[nn.Layer], list] = lambda m: [p for p in m.parameters() if not p.stop_gradient]


def encoder(batch: int, length: int, *, layers: int = 6, width: int = 384, heads: int = 12, vocab: int = 18000) -> Made:
    """An ERNIE-shaped classifier: embeddings, post-norm transformer encoder, pooler, two classes."""

    class Classifier(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(vocab, width), nn.Embedding(512, width)
            self.norm = nn.LayerNorm(width)
            one = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, activation="gelu")
            self.encoder = nn.TransformerEncoder(one, layers)
            self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

        def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
            places = paddle.arange(ids.shape[1]).unsqueeze(0).expand(ids.shape)
            hidden = self.encoder(self.norm(self.words(ids) + self.positions(places)))
            return self.head(paddle.tanh(self.pooler(hidden[:, 0])))

    ids, labels = paddle.randint(1, vocab, [batch, length]), paddle.randint(0, 2, [batch])
    return Classifier(), lambda m: nn.functional.cross_entropy(m(ids), labels)


def bias_only(batch: int, length: int) -> Made:
    model, loss = encoder(batch, length)
    for name, p in model.named_parameters():
        p.stop_gradient = not name.endswith("bias")
    return model, loss


def last_layers(batch: int, length: int, trained: int = 2) -> Made:
    model, loss = encoder(batch, length)
    kept = tuple(f"encoder.layers.{i}." for i in range(6 - trained, 6)) + ("pooler", "head")
    for name, p in model.named_parameters():
        p.stop_gradient = not name.startswith(kept)
    return model, loss


def lora(batch: int, length: int, rank: int = 8) -> Made:
    """Rank-8 adapters on q and v beside frozen projections, as two small Linear layers each."""

    class Adapted(nn.Layer):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.weight.shape[0], rank, bias_attr=False)
            self.up = nn.Linear(rank, base.weight.shape[1], bias_attr=False)

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return self.base(x) + self.up(self.down(x))

    model, loss = encoder(batch, length)
    for p in model.parameters():
        p.stop_gradient = True
    for layer in model.encoder.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = (
            Adapted(layer.self_attn.q_proj),
            Adapted(layer.self_attn.v_proj),
        )
    for p in model.head.parameters():
        p.stop_gradient = False
    return model, loss


def resnet20(batch: int) -> Made:
    """ResNet-20 for 32×32 images with GroupNorm (He et al. 2016, §4.2)."""

    class Block(nn.Layer):
        def __init__(self, cin: int, cout: int, stride: int):
            super().__init__()
            self.conv1 = nn.Conv2D(cin, cout, 3, stride, 1, bias_attr=False)
            self.conv2 = nn.Conv2D(cout, cout, 3, 1, 1, bias_attr=False)
            self.norm1, self.norm2 = nn.GroupNorm(8, cout), nn.GroupNorm(8, cout)
            self.skip = nn.Conv2D(cin, cout, 1, stride, bias_attr=False) if stride > 1 or cin != cout else None

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            y = nn.functional.relu(self.norm1(self.conv1(x)))
            y = self.norm2(self.conv2(y))
            return nn.functional.relu(y + (x if self.skip is None else self.skip(x)))

    blocks = [
        Block(16 if i == 0 and s == 0 else (c if i else c // 2), c, 2 if i == 0 and s else 1)
        for s, c in enumerate((16, 32, 64))
        for i in range(3)
    ]
    model = nn.Sequential(
        nn.Conv2D(3, 16, 3, 1, 1, bias_attr=False),
        nn.GroupNorm(8, 16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2D(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    images, labels = paddle.randn([batch, 3, 32, 32]), paddle.randint(0, 10, [batch])
    return model, lambda m: nn.functional.cross_entropy(m(images), labels)


def lstm(batch: int, length: int) -> Made:
    class Classifier(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.lstm, self.head = nn.Embedding(10000, 128), nn.LSTM(128, 256), nn.Linear(256, 2)

        def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
            return self.head(self.lstm(self.words(ids))[0][:, -1])

    ids, labels = paddle.randint(1, 10000, [batch, length]), paddle.randint(0, 2, [batch])
    return Classifier(), lambda m: nn.functional.cross_entropy(m(ids), labels)


def big_embedding(batch: int, rows: int = 1_000_000, width: int = 64, length: int = 16) -> Made:
    class Classifier(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(rows, width), nn.Linear(width, 2)

        def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
            return self.head(self.table(ids).mean(axis=1))

    ids, labels = paddle.randint(0, rows, [batch, length]), paddle.randint(0, 2, [batch])
    return Classifier(), lambda m: nn.functional.cross_entropy(m(ids), labels)


ROWS: dict[str, Row] = {
    "encoder": Row(lambda: encoder(16, 128), 16),
    "encoder-per-layer": Row(lambda: encoder(16, 128), 16, clipping="per_layer"),
    "encoder-T512": Row(lambda: encoder(4, 512), 4),
    "last-2-layers": Row(lambda: last_layers(16, 128), 16),
    "lora": Row(lambda: lora(16, 128), 16),
    "bitfit": Row(lambda: bias_only(16, 128), 16),
    "resnet20": Row(lambda: resnet20(64), 64),
    "lstm": Row(lambda: lstm(32, 64), 32),
    "embedding-1e6": Row(lambda: big_embedding(1024), 1024),
}


def stepper(row: Row, private: bool) -> Callable[[], None]:
    paddle.seed(0)
    model, loss = row.make()
    model.train()
    trained = row.plain_parameters(model)
    if private:
        from paddle_privacy import DPSGD

        optimizer = DPSGD(
            learning_rate=1e-3,
            parameters=trained,
            clip_norm=1.0,
            noise_multiplier=1.0,
            batch_size=row.batch,
            sampling="none",
            clipping=row.clipping,
        )
    else:
        optimizer = paddle.optimizer.SGD(learning_rate=1e-3, parameters=trained)

    def step() -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.clear_grad()

    return step


def time_row(name: str, repetitions: int) -> dict:
    row = ROWS[name]
    steps = {"plain": stepper(row, False), "private": stepper(row, True)}
    wall: dict[str, list[float]] = {kind: [] for kind in steps}
    cpu: dict[str, list[float]] = {kind: [] for kind in steps}
    for step in steps.values():
        step()
        step()
    for _ in range(repetitions):
        for kind, step in steps.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            step()
            wall[kind].append(time.perf_counter() - start)
            cpu[kind].append(time.process_time() - start_cpu)
    ratios = sorted(d / p for d, p in zip(wall["private"], wall["plain"]))
    plain, private = (statistics.median(wall[kind]) for kind in ("plain", "private"))
    quarter = len(ratios) // 4
    return {
        "plain_ms": 1e3 * plain,
        "private_ms": 1e3 * private,
        "time": private / plain,
        "time_q1": ratios[quarter],
        "time_q3": ratios[-1 - quarter],
        "cpu": statistics.median(cpu["private"]) / statistics.median(cpu["plain"]),
    }


def peak_resident_mib() -> float:
    # Not getrusage: its maximum is inherited from the parent process.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def memory_of(name: str, private: bool) -> dict:
    """Run in a process of its own."""
    if private:
        import paddle_privacy  # noqa: F401
    imported = peak_resident_mib()
    step = stepper(ROWS[name], private)
    for _ in range(3):
        step()
    peak = peak_resident_mib()
    allocated = paddle.base.core.host_memory_stat_peak_value("Allocated", 0) / 2**20
    return {"resident_mib": peak - imported, "allocated_mib": allocated}


def memory_row(name: str) -> dict:
    found = {}
    for kind in ("plain", "private"):
        out = subprocess.run(
            [sys.executable, __file__, "--memory-of", name, kind], capture_output=True, text=True, check=True
        ).stdout
        found[kind] = json.loads(out.strip().splitlines()[-1])
    return {
        "memory": found["private"]["allocated_mib"] / found["plain"]["allocated_mib"],
        "resident": found["private"]["resident_mib"] / found["plain"]["resident_mib"],
        "plain_mib": found["plain"]["allocated_mib"],
        "private_mib": found["private"]["allocated_mib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="five repetitions of three rows")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory-of", nargs=2, metavar=("ROW", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.memory_of:
        name, kind = options.memory_of
        print(json.dumps(memory_of(name, kind == "private")))
        return
    unknown = sorted(set(options.rows) - set(ROWS))
    if unknown:
        parser.error(f"unknown rows {unknown}; choose from {', '.join(ROWS)}")
    names = options.rows or (["encoder", "bitfit", "resnet20"] if options.quick else list(ROWS))
    print(f"{'row':20}{'plain ms':>10}{'private ms':>12}{'time':>7}{'(quartiles)':>15}", end="")
    print(f"{'cpu':>7}{'memory':>9}{'resident':>10}")
    for name in names:
        found = time_row(name, 5 if options.quick else options.repetitions)
        if not options.no_memory:
            found.update(memory_row(name))
        spread = f"({found['time_q1']:.2f}-{found['time_q3']:.2f})"
        memory = f"{found['memory']:9.2f}{found['resident']:10.2f}" if "memory" in found else ""
        print(
            f"{name:20}{found['plain_ms']:10.1f}{found['private_ms']:12.1f}{found['time']:7.2f}{spread:>15}{found['cpu']:7.2f}{memory}"
        )


if __name__ == "__main__":
    main()
