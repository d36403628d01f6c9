"""Peak memory and time of one training step with recompute, by clipping: the table in docs/modes.md.

    OMP_NUM_THREADS=2 python benchmarks/recompute.py

Each row runs in a process of its own; memory is the peak of Paddle's host allocator above what model and batch take.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

DEPTH, WIDTH, ROWS, LENGTH = 12, 256, 16, 128
RECOMPUTE = {"none": None, "reentrant": True, "non-reentrant": False}


def measure(recompute: str, clipping: str) -> dict[str, float]:
    import paddle
    from paddle import nn
    from paddle.base import core
    from paddle.distributed.fleet.utils import recompute as recomputed

    from paddle_privacy import DPSGD

    class Model(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.LayerList(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1) for _ in range(DEPTH))
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                how = RECOMPUTE[recompute]
                x = block(x) if how is None else recomputed(block, x, use_reentrant=how)
            return self.head(x.mean(axis=1))

    paddle.seed(0)
    model = Model()
    if clipping == "not private":
        optimizer = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    else:
        optimizer = DPSGD(
            parameters=model.parameters(), learning_rate=0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=ROWS,
            sampling="none", clipping=clipping,
        )  # fmt: skip
    seconds = []
    for _ in range(4):
        x = paddle.randn([ROWS, LENGTH, WIDTH])
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        before = core.host_memory_stat_current_value("Allocated", 0)
        start = time.perf_counter()
        (model(x) ** 2).sum(axis=1).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        seconds.append(time.perf_counter() - start)
        peak = core.host_memory_stat_peak_value("Allocated", 0)
    return {"mib": (peak - before) / 2**20, "seconds": min(seconds[1:])}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(*sys.argv[1:])))
        sys.exit()
    for clipping in ("not private", "flat", "per_layer"):
        for recompute in RECOMPUTE:
            output = subprocess.run([sys.executable, __file__, recompute, clipping], capture_output=True, text=True)
            row = json.loads(output.stdout.splitlines()[-1])
            print(f"{clipping:12} {recompute:14} {row['mib']:7.0f} MiB {row['seconds']:6.2f} s", flush=True)
