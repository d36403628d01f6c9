"""PaddleNLP's Trainer, private: the example, resume, and what is refused."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import numpy as np
import paddle
import pytest

warnings.simplefilter("ignore", DeprecationWarning)
pytest.importorskip("paddlenlp", reason="PaddleNLP comes with the extra [ernie]")

from paddle import nn  # noqa: E402
from paddlenlp.trainer import Trainer, TrainingArguments  # noqa: E402

from paddle_privacy import DPAdamW, PrivacyBudgetExceeded  # noqa: E402
from paddle_privacy.accounting import PoissonSampled, compute_epsilon  # noqa: E402
from paddle_privacy.errors import PrivacyError, UnsupportedLayer  # noqa: E402
from paddle_privacy.integrations.paddlenlp import DPTrainer, PrivacyArguments, PrivacyCallback  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


class Rows(paddle.io.Dataset):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, i):
        return {"x": np.full(4, i / 50, dtype="float32"), "labels": np.int64(i % 2)}


class Classifier(nn.Layer):
    def __init__(self, *extra: nn.Layer) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), *extra, nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x, labels=None):
        return self.layers(x)


def arguments(folder, **changed) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "logging_steps": 3,
            "save_steps": 4,
            "report_to": "none",
            "disable_tqdm": True,
            "device": "cpu",
            **changed,
        }
    )


def trainer_of(folder, model=None, privacy=None, kind=DPTrainer, optimizers=(None, None), **changed):
    given = {"privacy": privacy or PrivacyArguments(noise_multiplier=1.0, delta=1e-5)} if kind is DPTrainer else {}
    return kind(
        model=model or Classifier(),
        criterion=nn.CrossEntropyLoss(),
        train_dataset=Rows(),
        args=arguments(folder, **changed),
        optimizers=optimizers,
        **given,
    )


def test_the_example_and_its_resume(tmp_path):
    import trainer

    first = trainer.main(["--rows", "200", "--epochs", "2", "--output", str(tmp_path)])
    assert 7.9 < first["epsilon"] <= 8.0
    assert first["trainer"].optimizer.spending.steps == 8  # two epochs of ceil(200 / 64)
    state = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    assert state["global_step"] == 5
    sigma = first["trainer"].optimizer.noise_multiplier
    want = compute_epsilon(noise_multiplier=sigma, sample_rate=64 / 200, steps=5, delta=1e-5)
    assert state["log_history"][-1] == {"step": 5, "epsilon": pytest.approx(want, abs=1e-6), "delta": 1e-5}

    second = trainer.main(["--rows", "200", "--epochs", "2", "--output", str(tmp_path), "--resume"])
    assert second["epsilon"] == pytest.approx(first["epsilon"], rel=1e-12)
    assert second["trainer"].optimizer.spending.steps == 8


def test_batches_steps_and_events_are_what_they_are_said_to_be(tmp_path, caplog):
    trainer = trainer_of(tmp_path, bf16=True, fp16_opt_level="O1")
    trainer.train()
    optimizer = trainer.optimizer
    assert isinstance(optimizer, paddle.optimizer.AdamW)
    assert optimizer._grad_clip is None and optimizer.clip_norm == 1.0
    assert trainer.state.global_step == 2 * 9 == optimizer.spending.steps  # ceil(50 / 6) an epoch
    ((event, count),) = optimizer.accountant.history
    assert isinstance(event, PoissonSampled) and event.sample_rate == 6 / 50
    assert (event.event.noise_multiplier, count) == (1.0, 18)


def test_accumulation_gives_the_update_of_the_whole_batch(tmp_path):
    """σ=0, every row in every batch: two pieces of 25 must train like one of 50."""
    weights = []
    for size, pieces in ((50, 1), (25, 2)):
        paddle.seed(3)
        model = Classifier()
        trainer_of(
            tmp_path,
            model,
            PrivacyArguments(noise_multiplier=0.0, delta=1e-5, clip_norm=0.2),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=pieces,
            save_steps=100,
            max_steps=3,
        ).train()
        weights.append([p.numpy() for p in model.parameters()])
    for a, b in zip(*weights):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_budget_ends_training(tmp_path):
    privacy = PrivacyArguments(noise_multiplier=0.7, delta=1e-5, max_epsilon=4.0)
    trainer = trainer_of(tmp_path, privacy=privacy)
    with pytest.raises(PrivacyBudgetExceeded):
        trainer.train()
    assert trainer.optimizer.get_privacy_spent().epsilon <= 4.0


@pytest.mark.parametrize("target", [0.5, 3.0])
def test_a_target_is_met_at_the_last_step(tmp_path, target):
    trainer = trainer_of(tmp_path, privacy=PrivacyArguments(target_epsilon=target, delta=1e-5), max_steps=7)
    trainer.train()
    assert trainer.optimizer.spending.steps == 7
    assert 0.97 * target < trainer.optimizer.get_privacy_spent().epsilon <= target


def test_a_users_own_optimizer_and_schedule_become_private(tmp_path):
    model = Classifier()
    schedule = paddle.optimizer.lr.StepDecay(0.1, 5)
    own = paddle.optimizer.Momentum(schedule, parameters=model.parameters())
    trainer = trainer_of(tmp_path, model, optimizers=(own, schedule), max_steps=6)
    trainer.train()
    assert trainer.optimizer is own and own.spending.steps == 6
    assert own.get_lr() == pytest.approx(0.01)


def test_a_plain_trainer_with_a_private_optimizer_shows_epsilon(tmp_path):
    model = Classifier()
    schedule = paddle.optimizer.lr.StepDecay(0.1, 5)
    optimizer = DPAdamW(
        schedule,
        parameters=model,
        clip_norm=1.0,
        noise_multiplier=1.0,
        batch_size=3,
        dataset_size=50,
        target_delta=1e-5,
    )
    trainer = trainer_of(
        tmp_path, model, kind=Trainer, optimizers=(optimizer, schedule), gradient_accumulation_steps=1, save_steps=5
    )
    trainer.add_callback(PrivacyCallback())
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    assert state["log_history"][-1]["epsilon"] > 0
    assert trainer.state.log_history[-1]["epsilon"] == round(optimizer.get_privacy_spent().epsilon, 6)

    with pytest.raises(PrivacyError, match="trains without privacy"):
        plain = trainer_of(tmp_path, kind=Trainer)
        plain.add_callback(PrivacyCallback(1e-5))
        plain.train()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"fp16": True}, "fp16"),
        ({"unified_checkpoint": True}, "unified_checkpoint"),
        ({"amp_master_grad": True, "bf16": True, "fp16_opt_level": "O2"}, "amp_master_grad"),
    ],
)
def test_settings_that_are_not_covered_are_refused(tmp_path, changed, says):
    with pytest.raises(PrivacyError, match=says):
        trainer_of(tmp_path, **changed)


def test_other_refusals(tmp_path):
    with pytest.raises(UnsupportedLayer, match=r"layers\.1"):
        trainer_of(tmp_path, Classifier(nn.BatchNorm1D(6)))
    with pytest.raises(TypeError, match="privacy"):
        DPTrainer(model=Classifier(), args=arguments(tmp_path), privacy={"delta": 1e-5})
    with pytest.raises(ValueError, match="exactly one"):
        PrivacyArguments(delta=1e-5)
    with pytest.raises(ValueError, match="delta"):
        PrivacyArguments(noise_multiplier=1.0, delta=1.0)
    with pytest.raises(ValueError, match="50 rows"):
        trainer_of(tmp_path, per_device_train_batch_size=40).train()
    (tmp_path / "checkpoint-9").mkdir()
    with pytest.raises(PrivacyError, match="what its steps spent is unknown"):
        trainer_of(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
