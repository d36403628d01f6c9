"""A user's script, started by ``python -m paddle.distributed.launch``: the plain loop, then PaddleNLP's Trainer."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_privacy import DPSGD, PoissonBatchSampler
from paddle_privacy.checkpoint import MANIFEST
from paddle_privacy.distributed.step import parameter_bytes_digest

warnings.simplefilter("ignore")


def loop() -> dict:
    dist.init_parallel_env()
    rows = np.random.RandomState(0).randn(40, 6).astype("float32")
    dataset = paddle.io.TensorDataset([rows, np.arange(40) % 3])
    model = paddle.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    loader = paddle.io.DataLoader(dataset, batch_sampler=PoissonBatchSampler(dataset, batch_size=8))
    optimizer = DPSGD(
        parameters=model.parameters(),
        learning_rate=0.1,
        clip_norm=1.0,
        noise_multiplier=1.2,
        batch_size=8,
        data_loader=loader,
    )
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    epsilon, _ = optimizer.get_privacy_spent(target_delta=1e-5)
    optimizer.detach()
    return {"epsilon": epsilon, "digest": parameter_bytes_digest(model.parameters())}


class Rows(paddle.io.Dataset):
    def __init__(self, rows: int = 50) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i):
        return {"x": np.cos(np.arange(4) + i).astype("float32"), "labels": np.int64(i % 2)}


class Classifier(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x, labels=None):
        return self.layers(x)


def exact_trainer(folder: Path, world: int, stage: int = 0) -> dict:
    """Every row in every step (q = 1) and no noise: what one process computes, whoever has which row."""
    from paddlenlp.peft.lora.lora_layers import LoRALinear
    from paddlenlp.trainer import TrainingArguments

    from paddle_privacy.integrations.paddlenlp import PRIVATE_FOLDER, DPTrainer, PrivacyArguments

    paddle.seed(5)
    model = Classifier()
    adapted = LoRALinear(4, 6, r=2, lora_alpha=4)  # its own weight is frozen
    adapted.lora_B.set_value(paddle.ones([2, 6]) * 0.1)
    adapted.bias.stop_gradient = True
    model.layers[0] = adapted
    used = DPTrainer(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        train_dataset=Rows(48),
        args=TrainingArguments(
            output_dir=str(folder / "exact"),
            per_device_train_batch_size=24 // world,
            gradient_accumulation_steps=2,
            max_steps=4,
            learning_rate=0.01,
            save_strategy="steps" if stage else "no",
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
            device="cpu",
        ),
        privacy=PrivacyArguments(noise_multiplier=0.0, delta=1e-5, clip_norm=0.1, sharding_stage=stage),
    )
    used.train()
    trained = [p.numpy().ravel() for p in used.model.parameters() if not p.stop_gradient]
    held = sum(int(t.size) for kind in used.optimizer._accumulators.values() for t in kind.values())
    used.optimizer.detach()
    saved = {}
    if stage:
        manifest = folder / "exact" / "checkpoint-2" / PRIVATE_FOLDER / MANIFEST
        for _ in range(200):  # rank 0 writes while the others go on
            if manifest.exists():
                break
            time.sleep(0.1)
        saved = {
            k: v
            for k, v in json.loads(manifest.read_text())["optimizer"].items()
            if isinstance(v, dict) and "__tensor__" in v
        }
    return {
        "saved": len(saved),
        "batch_size": used.optimizer.batch_size,
        "steps": used.optimizer.spending.steps,
        "values": np.concatenate(trained).astype("float64").tolist(),
        "held": held,
    }


def trainer(folder: Path) -> dict:
    from paddlenlp.trainer import TrainingArguments

    from paddle_privacy.integrations.paddlenlp import DPTrainer, PrivacyArguments

    used = DPTrainer(
        model=Classifier(),
        criterion=nn.CrossEntropyLoss(),
        train_dataset=Rows(),
        args=TrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
            device="cpu",
        ),
        privacy=PrivacyArguments(noise_multiplier=1.0, delta=1e-5),
    )
    used.train()
    spent = used.optimizer.get_privacy_spent()
    return {
        "batch_size": used.optimizer.batch_size,
        "steps": used.optimizer.spending.steps,
        "epsilon": spent.epsilon,
        "digest": parameter_bytes_digest(list(used.model.parameters())),
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    found = {"loop": loop()}
    try:
        import paddlenlp  # noqa: F401

        found["trainer"] = trainer(place)
        found["exact"] = exact_trainer(place, 2)
        found["sharded"] = exact_trainer(place, 2, stage=2)
    except ImportError:
        pass
    (place / f"launched{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    # All that is tested is written. The Trainer leaves its loaders by `break`, so their reader threads live; once in
    # about twenty runs the process then died of a signal in Paddle's own exit, after this point.
    os._exit(0)
