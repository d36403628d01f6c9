"""A user's script, started by ``python -m paddle.distributed.launch``: the plain loop, then PaddleNLP's Trainer."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_privacy import DPSGD, PoissonBatchSampler
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
    def __len__(self) -> int:
        return 50

    def __getitem__(self, i):
        return {"x": np.full(4, i / 50, dtype="float32"), "labels": np.int64(i % 2)}


class Classifier(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x, labels=None):
        return self.layers(x)


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
    except ImportError:
        pass
    (place / f"launched{dist.get_rank()}.json").write_text(json.dumps(found))
