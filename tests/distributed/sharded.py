"""What the ranks of tests/distributed do with sharded optimizer states; run by worker.py."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import worker
from paddle import nn
from worker import ROWS, STEPS, backward, digest, fails, seeded_net, values

from paddle_privacy import DPSGD, DPAdamBC, DPAdamW, PrivacyEngine, dp_optimizer
from paddle_privacy.checkpoint import MANIFEST

PRIVACY = {"clip_norm": 0.3, "noise_multiplier": 0.0, "batch_size": 8, "dataset_size": ROWS}
KINDS: dict[str, Any] = {
    "adamw": (DPAdamW, {"learning_rate": 0.01}),
    "momentum": (dp_optimizer(paddle.optimizer.Momentum), {"learning_rate": 0.1}),
    # Paddle's own update, not the fused one; its trust ratio is a norm over a whole parameter.
    "lamb": (dp_optimizer(paddle.optimizer.Lamb), {"learning_rate": 0.01}),
}


def steps_of(optimizer: Any, used: nn.Layer, steps: list[list[int]]) -> None:
    for step in steps:
        own = step[worker.RANK :: worker.WORLD]
        if own:
            backward(used, own)
        else:
            used(paddle.to_tensor(worker.X[:1]), paddle.to_tensor(worker.IDS[:1])).sum().scale(0.0).backward()
        optimizer.step()
        optimizer.clear_grad()


def held_bytes(optimizer: Any) -> dict[str, int]:
    """Bytes of moments that this rank holds, by the parameter's place in the list."""
    places = {p.name: str(i) for i, p in enumerate(optimizer._clipped_sum.parameters)}
    found: dict[str, int] = {}
    for of_kind in optimizer._accumulators.values():
        for name, tensor in of_kind.items():
            found[places[name]] = found.get(places[name], 0) + int(tensor.size) * tensor.element_size()
    return found


def trained(kind: str, stage: int, groups: bool = False, thaw: bool = False) -> dict[str, Any]:
    """Training without noise; `thaw`: the base of the LoRA head joins after two steps."""
    if worker.RANK == 1:
        nn.Linear(2, 2)  # parameters are called otherwise on this rank from here on
    model = seeded_net(seed=7 if worker.RANK == 0 else 100)
    parameters: Any = model.parameters()
    if groups:
        half = len(parameters) // 2
        parameters = [{"params": parameters[:half], "learning_rate": 0.5}, {"params": parameters[half:]}]
    made, arguments = KINDS[kind]
    optimizer = made(parameters=parameters, sharding_stage=stage, **arguments, **PRIVACY)
    steps_of(optimizer, model, STEPS[:2])
    if thaw:
        for p in model.head.base.parameters():
            p.stop_gradient = False
    steps_of(optimizer, model, STEPS[2:])
    found = {"values": values(model), "digest": digest(model), "bytes": held_bytes(optimizer)}
    optimizer.detach()
    return found


def noise(stage: int) -> dict[str, Any]:
    """The noise of one update; and what leaves this rank on the way, which is noise too as no row has a gradient."""
    from paddle_privacy.distributed import ranks as communication

    paddle.seed(3)
    model = nn.Sequential(nn.Linear(100, 300), nn.Linear(300, 100))
    optimizer = DPSGD(
        parameters=model.parameters(),
        learning_rate=1.0,
        clip_norm=0.5,
        noise_multiplier=3.0,
        batch_size=4,
        dataset_size=100,
        sharding_stage=stage,
    )
    sent: dict[str, list[np.ndarray]] = {"sum": [], "value": []}
    real = {name: getattr(dist, name) for name in ("reduce", "all_reduce", "broadcast")}

    def listened(name: str, kind: str) -> Any:
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if name != "broadcast" or kwargs["src"] == worker.RANK:
                sent[kind].append(tensor.numpy().ravel())
            return real[name](tensor, *args, **kwargs)

        return call

    before = values(model)
    model(paddle.zeros([1, 100])).sum().scale(0.0).backward()
    try:
        for name, kind in (("reduce", "sum"), ("all_reduce", "sum"), ("broadcast", "value")):
            setattr(communication.dist, name, listened(name, kind))
        optimizer.step()
    finally:
        for name, call in real.items():
            setattr(communication.dist, name, call)
    moved = np.array(values(model)) - np.array(before)
    own = {np.float32(v).tobytes() for v in values(model)}
    out = np.concatenate(sent["sum"]) if sent["sum"] else np.zeros(0)
    found = {
        "count": len(moved),
        "chi2": float((moved**2).sum() / (3.0 * 0.5 / 4) ** 2),
        "mean": float(moved.mean()),
        "sent": len(out),
        "sent chi2": float((out**2).sum() / (3.0 * 0.5 / worker.WORLD**0.5) ** 2),
        # All else that leaves is the new values.
        "values only": all(v.tobytes() in own for part in sent["value"] for v in part.astype("float32")),
        "digest": digest(model),
    }
    optimizer.detach()
    model = seeded_net()
    corrected = DPAdamBC(
        0.01, parameters=model.parameters(), **{**PRIVACY, "noise_multiplier": 2.0}, sharding_stage=stage
    )
    steps_of(corrected, model, STEPS[:2])
    found["noise moment"] = corrected._noise_moment
    corrected.detach()
    return found


def resumable(place: Path, save: bool) -> dict[str, Any]:
    """Saved by two ranks that own a half each, and resumed by any number, with Adam's moments and a schedule."""
    if worker.RANK == 1:
        nn.Embedding(2, 2)
    model = seeded_net(seed=7 if save else 50)
    engine = PrivacyEngine()
    schedule = paddle.optimizer.lr.ExponentialDecay(0.01, 0.9)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters())
    rows = paddle.io.TensorDataset([worker.X])
    model, optimizer, _ = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=paddle.io.DataLoader(rows, batch_size=8, shuffle=True),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        sharding_stage=2,
    )
    # Fixed rows instead of drawn ones: the result must be the same whoever owns what.
    optimizer.spending.observe = lambda rows: None
    if save:
        steps_of(optimizer, model, STEPS[:2])
        schedule.step()
        engine.save_checkpoint(path=place, module=model)
        state = optimizer.state_dict()
        optimizer.set_state_dict(state)
    else:
        engine.load_checkpoint(path=place, module=model)
        state = optimizer.state_dict()  # also before the first step
    steps = optimizer.spending.steps
    steps_of(optimizer, model, STEPS[2:])
    found = {
        "values": values(model),
        "digest": digest(model),
        "steps": steps,
        "rate": schedule.last_lr,
        "entries": sum(isinstance(v, paddle.Tensor) for v in state.values()),
        "bytes": held_bytes(optimizer),
    }
    optimizer.detach()
    return found


def master_weights() -> dict[str, Any]:
    """bfloat16 parameters with float32 masters. An embedding is what the CPU has bfloat16 kernels for."""
    paddle.seed(worker.RANK)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Embedding(5, 4))
    model.to(dtype="bfloat16")
    made = DPAdamW(1e-4, parameters=model.parameters(), multi_precision=True, sharding_stage=2, **PRIVACY)

    def step(rows: list[int]) -> None:
        own = rows[worker.RANK :: worker.WORLD]
        ids = paddle.to_tensor(worker.IDS[own])
        out = [model[0](ids), model[1](ids % 5)]
        sum((o.astype("float32") ** 2).mean() for o in out).backward()
        made.step()
        made.clear_grad()

    step(STEPS[0])
    held = {n: t.numpy().ravel().tolist() for n, t in made._master_weights.items()}
    state = made.state_dict()
    masters = [state["master_weights"][p.name].numpy().ravel().tolist() for p in model.parameters()]
    made.set_state_dict(state)
    step(STEPS[1])
    rounded = [p.astype("float32").numpy().ravel().tolist() for p in model.parameters()]
    made.detach()
    return {"held": len(held), "masters": masters, "rounded": rounded, "still held": len(made._master_weights)}


def refused() -> dict[str, str]:
    """Ranks that disagree about sharding, and a save by one rank alone: told to all, and nothing hangs."""
    model = seeded_net()
    found = {
        "stages": fails(
            lambda: DPAdamW(
                0.1, parameters=model.parameters(), sharding_stage=2 if worker.RANK else 0, **PRIVACY
            ).detach()
        )
    }
    optimizer = DPAdamW(0.1, parameters=model.parameters(), sharding_stage=1, **PRIVACY)
    backward(model, [worker.RANK])
    if worker.RANK == 0:
        found["alone"] = fails(optimizer.state_dict)
    else:
        found["alone"] = fails(optimizer.step)
    before = digest(model)
    backward(model, [worker.RANK])
    found["and goes on"] = fails(optimizer.step)
    found["moved"] = str(digest(model) != before)
    optimizer.detach()
    return found


def under_fleet() -> dict[str, Any]:
    """fleet's own lines with sharding_degree: the script stays as it is."""
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": worker.WORLD}
    fleet.init(is_collective=True, strategy=strategy)
    model = seeded_net()
    used = fleet.distributed_model(model)
    private = DPAdamW(0.01, parameters=model.parameters(), **PRIVACY)
    optimizer = fleet.distributed_optimizer(private)
    steps_of(optimizer, used, STEPS)
    found = {
        "values": values(model),
        "digest": digest(model),
        "bytes": held_bytes(private),
        "wrappers": [type(used).__name__, type(optimizer).__name__],
        "steps": private.spending.steps,
    }
    private.detach()
    return found


def everything(root: Path) -> dict[str, Any]:
    """`root`: a folder that outlives this number of ranks; the run of two saves there what others resume."""
    cases = {
        "adamw": lambda: trained("adamw", 2),
        "momentum, groups": lambda: trained("momentum", 1, groups=True),
        "lamb, thawed": lambda: trained("lamb", 2, thaw=True),
    }
    # Every collective waits for every rank, which takes long on a busy machine: each case on some numbers of ranks.
    some = {3: ["lamb, thawed"], 4: ["momentum, groups"]}.get(worker.WORLD, list(cases))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, Any] = {
            "equality": {name: cases[name]() for name in some},
            "noise": {"sharded": noise(2)},
        }
        if worker.WORLD < 3:
            found["equality"]["whole"] = trained("adamw", 0)
            found["noise"]["whole"] = noise(0)
        if worker.WORLD < 4:
            found["master"] = master_weights()
            place = root / "saved by two"
            if worker.WORLD == 2 or (place / MANIFEST).exists():
                found["resumed"] = resumable(place, save=worker.WORLD == 2)
        if worker.WORLD > 1:
            found["refused"] = refused()
        if worker.WORLD == 2:
            # Of three and more gloo ranks fleet.init itself hangs now and then, while it makes its groups.
            found["fleet"] = under_fleet()
    return found
