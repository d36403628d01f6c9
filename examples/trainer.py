"""PaddleNLP's Trainer, private: what changes are the lines marked "private".

A tiny ERNIE learns to tell two kinds of token sequences apart; replace model and data by your own.

    python examples/trainer.py --output runs/trainer
    python examples/trainer.py --output runs/trainer --resume
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np
import paddle
from paddle.io import Dataset
from paddlenlp.trainer import TrainingArguments, get_last_checkpoint
from paddlenlp.transformers import ErnieConfig, ErnieForSequenceClassification

from paddle_privacy.integrations.paddlenlp import DPTrainer, PrivacyArguments  # private: instead of Trainer


class Sentences(Dataset):
    """Rows of 12 token ids; the label says whether small ids prevail."""

    def __init__(self, rows: int, seed: int) -> None:
        rng = np.random.RandomState(seed)
        self.labels = rng.randint(0, 2, rows)
        self.ids = np.where(
            rng.rand(rows, 12) < 0.8, rng.randint(1, 40, (rows, 12)) + 40 * self.labels[:, None], rng.randint(1, 80)
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": self.ids[i].astype("int64"), "labels": np.int64(self.labels[i])}


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=None, help="folder for checkpoints (default: a temporary one)")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --output")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args(arguments)
    output = options.output or tempfile.mkdtemp(prefix="paddle-privacy-")

    paddle.seed(1)
    model = ErnieForSequenceClassification(
        ErnieConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            num_labels=2,
            use_task_id=False,
        )
    )
    trainer = DPTrainer(  # private: instead of Trainer
        model=model,
        criterion=paddle.nn.CrossEntropyLoss(),
        train_dataset=Sentences(options.rows, seed=0),
        eval_dataset=Sentences(200, seed=1),
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        args=TrainingArguments(
            output_dir=output,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,  # logical batches of 64, in four pieces
            per_device_eval_batch_size=100,
            learning_rate=3e-3,
            max_grad_norm=1.0,  # private: the bound on each row's gradient
            bf16=options.bf16,
            logging_steps=2,
            save_steps=5,
            report_to="none",
            disable_tqdm=True,
            device="cpu",
        ),
        privacy=PrivacyArguments(target_epsilon=8.0, delta=1e-5),  # private
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if options.resume else None)
    metrics = trainer.evaluate()
    epsilon, delta = trainer.optimizer.get_privacy_spent()
    print(f"accuracy {metrics['eval_accuracy']:.3f}, ε={epsilon:.2f} at δ={delta:g} (add or remove one row), {output}")
    return {"accuracy": metrics["eval_accuracy"], "epsilon": epsilon, "trainer": trainer}


if __name__ == "__main__":
    main()
