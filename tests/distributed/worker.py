"""What the ranks of tests/distributed do: ``python worker.py <folder> <W> [<W> ...]``; W=1 runs alone, the reference.

Writes ``<folder>/<W>/rank<r>.json``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from launch import run_ranks
from paddle import amp, nn
from paddle.distributed.fleet.utils import recompute
from paddle.io import DataLoader, DistributedBatchSampler, TensorDataset

from paddle_privacy import (
    DPSGD,
    DPAdamW,
    NoiseGenerator,
    PoissonBatchSampler,
    PoissonDataLoader,
    PrivacyBudgetExceeded,
    PrivacyEngine,
    PrivacyError,
)
from paddle_privacy.distributed.step import parameter_bytes_digest

RANK, WORLD = 0, 1

ROWS = 24
X = np.random.RandomState(0).randn(ROWS, 6).astype("float32")
Y = np.random.RandomState(1).randint(0, 3, ROWS)
IDS = np.random.RandomState(2).randint(0, 11, [ROWS, 5])


class Block(nn.Layer):
    def __init__(self, remember: bool):
        super().__init__()
        self.inner, self.norm, self.remember = nn.Linear(8, 8), nn.LayerNorm(8), remember

    def forward(self, x):
        def body(x):
            return self.norm(paddle.tanh(self.inner(x)))

        return body(x) if self.remember else recompute(body, x)


class LoRA(nn.Layer):
    """A frozen linear layer and a trained product of rank 2, as parameters used barely."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 3)
        self.down, self.up = nn.Linear(8, 2, bias_attr=False), nn.Linear(2, 3, bias_attr=False)
        for p in self.base.parameters():
            p.stop_gradient = True

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Net(nn.Layer):
    """Embedding, a block that may be recomputed, and a LoRA head: the ways that gradients come about."""

    def __init__(self, remember: bool = True):
        super().__init__()
        self.table, self.first, self.block, self.head = nn.Embedding(11, 8), nn.Linear(6, 8), Block(remember), LoRA()

    def forward(self, x, ids):
        return self.head(self.block(self.first(x) + self.table(ids).mean(axis=1)))


def seeded_net(remember: bool = True, seed: int = 7) -> nn.Layer:
    paddle.seed(seed)
    return Net(remember)


def values(model: nn.Layer) -> list[float]:
    return np.concatenate([p.numpy().ravel() for p in model.parameters()]).astype("float64").tolist()


def digest(model: nn.Layer) -> str:
    return parameter_bytes_digest(list(model.parameters()))


def backward(model: nn.Layer, rows: Any) -> None:
    out = model(paddle.to_tensor(X[rows]), paddle.to_tensor(IDS[rows]))
    nn.functional.cross_entropy(out, paddle.to_tensor(Y[rows])).backward()


# Fixed groups of rows a step, dealt out to any number of ranks.
STEPS = [list(range(9)), list(range(5, 17)), [20, 3], list(range(8, 24))]


def train(remember: bool, wrap: str, kind: str, pieces: int) -> dict[str, Any]:
    """Training without noise on STEPS; each rank takes every W-th row of a step, in `pieces` backward passes."""
    model = seeded_net(remember, seed=7 if RANK == 0 else 100 + RANK)  # rank 0's parameters count
    used: Any = model
    if wrap == "before":
        used = paddle.DataParallel(model)
    kinds = {"sgd": DPSGD, "adamw": DPAdamW}
    optimizer = kinds[kind](
        parameters=model.parameters(),
        learning_rate=0.2 if kind == "sgd" else 0.01,
        clip_norm=0.3,
        noise_multiplier=0.0,
        batch_size=8,
        dataset_size=ROWS,
    )
    if wrap == "after":
        used = paddle.DataParallel(model, find_unused_parameters=True)
    for step in STEPS:
        own = step[RANK::WORLD]
        for k in range(pieces):
            part = own[k::pieces]
            if part:
                backward(used, part)
        if not own:
            # Nothing of this step is here: a placeholder row of weight zero.
            used(paddle.to_tensor(X[:1]), paddle.to_tensor(IDS[:1])).sum().scale(0.0).backward()
        optimizer.step()
        optimizer.clear_grad()
    found = {"values": values(model), "digest": digest(model), "epsilon": optimizer.get_privacy_spent(1e-5).epsilon}
    optimizer.detach()
    return found


def equality() -> dict[str, Any]:
    """σ = 0: the same updates as one process."""
    found = {}
    for name, case in {
        "plain": (True, "", "sgd", 1),
        "wrapped before": (True, "before", "sgd", 1),
        "wrapped after": (True, "after", "sgd", 1),
        "recompute": (False, "before", "sgd", 1),
        "pieces, adamw": (True, "", "adamw", 2),
    }.items():
        found[name] = train(*case)
    return found


def all_rows_in_pieces() -> dict[str, Any]:
    """Virtual batches of the library's own loader, where every row is in every batch (q = 1)."""
    data = TensorDataset([X, IDS, Y])
    model = seeded_net()
    sampler = PoissonBatchSampler(data, ROWS, steps=3, max_physical_batch_size=5)
    loader = PoissonDataLoader(DataLoader(data, batch_size=ROWS), sampler)
    optimizer = DPAdamW(
        parameters=model.parameters(),
        learning_rate=0.01,
        clip_norm=0.3,
        noise_multiplier=0.0,
        batch_size=ROWS,
        data_loader=loader,
        sharding_stage=2,
    )
    backwards = 0
    for x, ids, y in loader:
        nn.functional.cross_entropy(model(x, ids), y).backward()
        optimizer.step()
        optimizer.clear_grad()
        backwards += 1
    found = {"values": values(model), "digest": digest(model), "pieces": backwards, "steps": optimizer.spending.steps}
    optimizer.detach()
    return found


def low_precision(dtype: str) -> dict[str, Any]:
    """A scaled loss and nn.Linear as auto_cast makes it: rounded inputs and weights, results and output gradients.

    Paddle switches auto_cast and GradScaler off on CPUs, so the rounding is imitated and the scaler is told of a GPU.
    """

    def linear(x: Any, weight: Any, bias: Any = None, name: Any = None) -> Any:
        rounded = [v.astype(dtype).astype("float32") for v in (x, weight)]
        y = paddle.matmul(*rounded) + (0 if bias is None else bias.astype("float32"))
        return y.astype(dtype).astype("float32")

    class Tracer:
        class _expected_place:
            is_gpu_place = staticmethod(lambda: True)

    made, original = nn.functional.linear, amp.grad_scaler._dygraph_tracer
    nn.functional.linear, amp.grad_scaler._dygraph_tracer = linear, Tracer
    try:
        scaler = amp.GradScaler(init_loss_scaling=1024.0, use_dynamic_loss_scaling=False)
        assert scaler.is_enable()
        model = seeded_net()
        optimizer = DPSGD(
            parameters=model.parameters(),
            learning_rate=0.2 / 8,
            clip_norm=0.3,
            noise_multiplier=0.0,
            batch_size=8,
            loss_reduction="sum",  # the mean of a share would be rounded otherwise than that of the whole
            dataset_size=ROWS,
        )
        for step in STEPS[:2] + STEPS[3:]:
            rows = step[RANK::WORLD]
            out = model(paddle.to_tensor(X[rows]), paddle.to_tensor(IDS[rows]))
            loss = nn.functional.cross_entropy(out, paddle.to_tensor(Y[rows]), reduction="sum")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
    finally:
        nn.functional.linear, amp.grad_scaler._dygraph_tracer = made, original
    found = {"values": values(model), "digest": digest(model), "scale": float(scaler._scale)}
    optimizer.detach()
    return found


def adaptive_run() -> dict[str, Any]:
    """Adaptive clipping without noise worth speaking of: C follows the quantile of all ranks' rows."""
    from paddle_privacy.clipping import AdaptiveClipping

    model = seeded_net()
    optimizer = DPSGD(
        parameters=model.parameters(),
        learning_rate=0.1,
        clipping=AdaptiveClipping(0.5, count_noise=1e-6),
        noise_multiplier=1e-9,
        batch_size=8,
        dataset_size=ROWS,
    )
    bounds = []
    for step in STEPS[:2] + STEPS[3:]:  # the short one leaves ranks without a row, and a stand-in has a norm: 0
        backward(model, step[RANK::WORLD])
        optimizer.step()
        optimizer.clear_grad()
        bounds.append(optimizer.clip_norm)
    optimizer.detach()
    return {"bounds": bounds, "digest": digest(model)}


def noise() -> dict[str, Any]:
    """The noise in one update: σC/B in every coordinate, whatever W, also where all ranks were given one seed."""
    found = {}
    for name, generator in {"os": None, "one seed on all ranks": "seeded"}.items():
        paddle.seed(3)
        model = nn.Linear(200, 300)
        optimizer = DPSGD(
            parameters=model.parameters(),
            learning_rate=1.0,
            clip_norm=0.5,
            noise_multiplier=3.0,
            batch_size=4,
            dataset_size=100,
            generator=NoiseGenerator.seeded(11) if generator else None,
            secure=generator is None,
        )
        before = np.array(values(model))
        model(paddle.zeros([1, 200])).sum().scale(0.0).backward()
        optimizer.step()
        noise = np.array(values(model)) - before
        found[name] = {
            "count": len(noise),
            "chi2": float((noise**2).sum() / (3.0 * 0.5 / 4) ** 2),
            "mean": float(noise.mean()),
            "digest": digest(model),
            "epsilon": optimizer.get_privacy_spent(1e-5).epsilon,
            "world": optimizer.privacy_statement()["world_size"],
        }
        optimizer.detach()
    return found


def sampled(folder: Path) -> dict[str, Any]:
    """A private loop over Poisson shares with virtual batches, an engine, a budget, and one ledger."""
    data = TensorDataset([X, IDS, Y])
    sampler = PoissonBatchSampler(data, 6, steps=12, max_physical_batch_size=2)
    model = seeded_net(seed=RANK)
    optimizer = DPSGD(
        parameters=model.parameters(),
        learning_rate=0.1,
        clip_norm=1.0,
        noise_multiplier=1.0,
        batch_size=6,
        data_loader=(loader := PoissonDataLoader(DataLoader(data, batch_size=6), sampler)),
        target_delta=1e-5,
        ledger=folder / "ledger.jsonl",
    )
    updates = 0
    for x, ids, y in loader:
        nn.functional.cross_entropy(model(x, ids), y).backward()
        optimizer.step()
        optimizer.clear_grad()
    updates = optimizer.spending.steps
    found = {"updates": updates, "digest": digest(model), "epsilon": optimizer.get_privacy_spent().epsilon}
    if optimizer._ledger.is_open:
        optimizer._ledger.close()
    optimizer.detach()

    for name, batches in {
        "engine": {"batch_size": 6, "shuffle": True},
        "engine, dealt out": {"batch_sampler": DistributedBatchSampler(data, 2, shuffle=True)},
    }.items():
        model = seeded_net(seed=RANK)
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=paddle.optimizer.AdamW(0.01, parameters=model.parameters()),
            data_loader=DataLoader(data, **batches),
            target_epsilon=3.0,
            target_delta=1e-3,
            epochs=2,
            max_grad_norm=1.0,
        )
        stopped = 0
        for _ in range(3):
            try:
                for x, ids, y in loader:
                    nn.functional.cross_entropy(model(x, ids), y).backward()
                    optimizer.step()
                    optimizer.clear_grad()
            except PrivacyBudgetExceeded:
                stopped = optimizer.spending.steps
                break
        found[name] = {
            "rate": optimizer.spending.sample_rate,
            "batch_size": optimizer.batch_size,
            "sigma": optimizer.noise_multiplier,
            "stopped": stopped,
            "epsilon": engine.get_epsilon(1e-3),
            "digest": digest(model),
        }
        optimizer.detach()

    # Shuffled batches, dealt out by Paddle's own sampler.
    model = seeded_net()
    loader = DataLoader(data, batch_sampler=DistributedBatchSampler(data, 2, shuffle=True))
    optimizer = DPSGD(
        parameters=model.parameters(),
        learning_rate=0.1,
        clip_norm=1.0,
        noise_multiplier=1.0,
        batch_size=2 * WORLD,
        data_loader=loader,
    )
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        for x, ids, y in loader:
            nn.functional.cross_entropy(model(x, ids), y).backward()
            optimizer.step()
            optimizer.clear_grad()
    found["shuffled"] = {
        "history": [(event.to_dict(), count) for event, count in optimizer.accountant.history],
        "digest": digest(model),
    }
    optimizer.detach()
    return found


def fails(run: Any) -> str:
    try:
        run()
    except PrivacyError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals() -> dict[str, Any]:
    """What goes wrong on one rank is raised on all; what cannot be made private is refused on all."""
    found = {}

    def optimizer_of(model: nn.Layer, **more: Any) -> Any:
        settings = {"batch_size": 4, "noise_multiplier": 1.0, "dataset_size": ROWS, "learning_rate": 0.1, **more}
        return DPSGD(parameters=model.parameters(), clip_norm=1.0, **settings)

    model = seeded_net()
    optimizer = optimizer_of(model)
    backward(model, [0, 1])
    if RANK == WORLD - 1:
        paddle.matmul(model.first.weight, model.first.weight.T).sum().backward()  # a use that no tap sees
    before = digest(model)
    found["capture"] = fails(optimizer.step)
    found["capture, untouched"] = digest(model) == before and optimizer.spending.steps == 0
    backward(model, [RANK])
    found["and goes on"] = fails(optimizer.step)

    optimizer.set_lr(0.1 + 0.1 * RANK)
    backward(model, [2])
    found["learning rate"] = fails(optimizer.step)
    optimizer.set_lr(0.1)
    optimizer.detach()

    optimizer = optimizer_of(model)
    backward(model, [3])
    optimizer.step()
    if RANK == WORLD - 1:
        model.first.bias.set_value(model.first.bias + 1e-7)
    backward(model, [4])
    found["divergence"] = fails(optimizer.step)
    optimizer.detach()

    found["models"] = fails(lambda: optimizer_of(nn.Linear(4, 4 + RANK)))
    data = TensorDataset([X, IDS, Y])
    found["loader of one process"] = fails(
        lambda: optimizer_of(model, data_loader=DataLoader(data, batch_size=4, shuffle=True), dataset_size=None)
    )
    found["sampler of one process"] = fails(
        lambda: optimizer_of(
            model,
            data_loader=DataLoader(data, batch_sampler=PoissonBatchSampler(data, 4, num_replicas=1, rank=0)),
            dataset_size=None,
        )
    )
    model = seeded_net()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wrapped = paddle.DataParallel(model)
        optimizer = optimizer_of(wrapped)
        backward(wrapped, [RANK])
        optimizer.step()
    found["said"] = [str(w.message) for w in said if "DataParallel" in str(w.message)]
    found["said, rows"] = [str(w.message) for w in said if "no row is on two" in str(w.message)]
    optimizer.detach()
    return found


def be_a_rank(folder: Path) -> None:
    global RANK, WORLD
    import sharded

    dist.init_parallel_env()
    RANK, WORLD = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"equality": equality(), "adaptive": adaptive_run(), "noise": noise()}
    found["virtual"] = all_rows_in_pieces()
    found["low"] = {dtype: low_precision(dtype) for dtype in ("float32", "bfloat16")}
    if WORLD > 1:
        found["sampled"], found["refusals"] = sampled(folder), refusals()
    found["sharded"] = sharded.everything(folder.parent)
    (folder / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.modules["worker"] = sys.modules["__main__"]
    warnings.simplefilter("ignore")
    for number in sys.argv[2:]:
        place = Path(sys.argv[1]) / number
        place.mkdir()
        run_ranks(int(number), lambda place=place: be_a_rank(place), place)
