"""PaddleNLP's ``Trainer``, private.

:class:`DPTrainer` takes the place of ``Trainer``: Poisson batches instead of shuffled ones, a private optimizer instead
of the configured one, no second clipping, ε in every log line and in ``trainer_state.json``, and checkpoints that carry
the account. :class:`PrivacyCallback` is only the display, for a ``Trainer`` that was given a private optimizer.
"""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_privacy.checkpoint import MANIFEST, load_checkpoint, save_checkpoint
from paddle_privacy.engine import adopt_optimizer
from paddle_privacy.errors import PrivacyError, PrivacyWarning
from paddle_privacy.noise import NoiseGenerator
from paddle_privacy.optimizer import PrivateOptimizer
from paddle_privacy.sampling import PoissonBatchSampler, PoissonDataLoader
from paddle_privacy.validation import ModuleValidator

try:
    from paddlenlp.trainer import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "paddle_privacy.integrations.paddlenlp needs PaddleNLP: pip install 'paddle-privacy[ernie]'"
    ) from error

PRIVATE_FOLDER = "paddle_privacy"
_EPSILON, _DELTA = "epsilon", "delta"


@dataclass
class PrivacyArguments:
    """What ``TrainingArguments`` does not know.

    Args:
        target_epsilon: the budget for ``num_train_epochs`` (or ``max_steps``); σ is calibrated to it. Training on
            raises :class:`~paddle_privacy.PrivacyBudgetExceeded`.
        noise_multiplier: σ, instead.
        delta: δ of every ε that is stated.
        clip_norm: C; by default ``TrainingArguments.max_grad_norm``, whose own use is switched off.
        clipping, accountant, max_epsilon, ledger, generator, secure, sharding_stage: as in
            :class:`paddle_privacy.DPSGD`; sharding_stage takes the place of ``TrainingArguments.sharding``.
    """

    delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    clip_norm: Any = None
    clipping: Any = "flat"
    accountant: str = "rdp"
    max_epsilon: float | None = None
    ledger: Any = None
    generator: NoiseGenerator | None = None
    secure: bool = True
    sharding_stage: int | None = None

    def __post_init__(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("pass exactly one of target_epsilon and noise_multiplier")
        if not isinstance(self.delta, float) or not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta!r}")


class PrivacyCallback(TrainerCallback):
    """ε in the logs and in ``trainer_state.json``, for a ``Trainer`` whose optimizer is private.

    Args:
        delta: δ at which ε is stated; by default the optimizer's ``target_delta``.

    A plain ``Trainer`` shuffles, and accumulates by dividing the loss; both are sound and both cost: ε comes without
    amplification by sampling, and each gradient is clipped after the division. :class:`DPTrainer` does neither.
    """

    def __init__(self, delta: float | None = None) -> None:
        self.delta = delta

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs.get("optimizer")
        if not isinstance(optimizer, PrivateOptimizer):
            raise PrivacyError(
                f"the Trainer's optimizer is {type(optimizer).__name__}, which trains without privacy; use DPTrainer, "
                "or pass optimizers=(DPAdamW(...), schedule)"
            )
        optimizer.get_privacy_spent(self.delta)
        self.optimizer = optimizer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and hasattr(self, "optimizer"):
            logs.update(self._spent())
            self._remember(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save and not control.should_log:
            self._remember(state)

    def _spent(self) -> dict[str, float]:
        spent = self.optimizer.get_privacy_spent(self.delta)
        return {_EPSILON: round(spent.epsilon, 6), _DELTA: spent.delta}

    def _remember(self, state: Any) -> None:
        """The only open field of the Trainer's state; it is written as JSON with every checkpoint."""
        entry = {"step": state.global_step, **self._spent()}
        if not state.log_history or state.log_history[-1] != entry:
            state.log_history.append(entry)


class DPTrainer(Trainer):
    """PaddleNLP's ``Trainer`` with private training.

    Args:
        privacy: what :class:`TrainingArguments` lacks.
        others: the arguments of ``Trainer``. ``per_device_train_batch_size * gradient_accumulation_steps`` (times
            the number of processes under ``paddle.distributed.launch``) is the expected size of a logical batch;
            ``bf16`` works as before; ``optimizers=(optimizer, schedule)`` may hold any first-order Paddle optimizer.

    Raises:
        PrivacyError: a setting under which privacy could not be guaranteed (fp16 loss scaling, sharding,
            master gradients).
        UnsupportedLayer: the model has layers that cannot be trained privately.
    """

    def __init__(self, *others: Any, privacy: PrivacyArguments, **kwargs: Any) -> None:
        if not isinstance(privacy, PrivacyArguments):
            raise TypeError(f"privacy must be PrivacyArguments, got {type(privacy).__name__}")
        super().__init__(*others, **kwargs)
        self.privacy = privacy
        _check_arguments(self.args)
        ModuleValidator.validate(self.model, strict=True)
        # Batches of a resumed epoch are drawn afresh: skipping "the same ones" means nothing for a Poisson sampler.
        self.args.ignore_data_skip = True
        self._clip_norm = privacy.clip_norm if privacy.clip_norm is not None else self.args.max_grad_norm
        self.args.max_grad_norm = 0.0
        self._privacy_callback = PrivacyCallback(privacy.delta)
        # Before all others: they print and record the logs that this one adds to.
        self.callback_handler.callbacks.insert(0, self._privacy_callback)
        self._train_loader: PoissonDataLoader | None = None

    # The data

    def get_train_dataloader(self) -> PoissonDataLoader:
        """The Trainer's own loader over Poisson batches; each logical batch comes in the pieces that it accumulates."""
        if self._train_loader is not None:
            return self._train_loader
        plain = super().get_train_dataloader()
        rows = len(plain.dataset)
        pieces = self.args.gradient_accumulation_steps
        size = self.args.per_device_train_batch_size * pieces * self.args.world_size
        if size > rows:
            raise ValueError(
                f"per_device_train_batch_size * gradient_accumulation_steps * world_size = {size} is more than the "
                f"{rows} rows of train_dataset"
            )
        sampler = PoissonBatchSampler(num_rows=rows, batch_size=size, micro_batches=pieces if pieces > 1 else None)
        self._train_loader = PoissonDataLoader(plain, sampler)
        return self._train_loader

    # The optimizer

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        super().create_optimizer_and_scheduler(num_training_steps)
        assert self._train_loader is not None
        if isinstance(self.optimizer, PrivateOptimizer):
            if self.optimizer.spending.scheme is None or self.optimizer.spending.scheme.sampler is not (
                self._train_loader.batch_sampler
            ):
                raise PrivacyError(
                    "the optimizer given to DPTrainer is private already and knows nothing of its batches; give it a "
                    "plain Paddle optimizer"
                )
            return
        sampler, privacy = self._train_loader.batch_sampler, self.privacy
        adopt_optimizer(
            self.optimizer,
            self.model,
            batch_size=sampler.batch_size,
            clip_norm=self._clip_norm,
            noise_multiplier=privacy.noise_multiplier,
            target_epsilon=privacy.target_epsilon,
            target_delta=privacy.delta,
            max_epsilon=privacy.max_epsilon,
            # Exactly as many steps as the Trainer will take; planned_steps rounds up.
            epochs=(num_training_steps - 0.5) / sampler.steps,
            data_loader=self._train_loader,
            clipping=privacy.clipping,
            accountant=privacy.accountant,
            ledger=privacy.ledger,
            generator=privacy.generator,
            secure=privacy.secure,
            sharding_stage=privacy.sharding_stage,
        )
        assert self.optimizer.spending.planned_steps == math.ceil(num_training_steps)

    def training_step(self, model: Any, inputs: dict[str, Any], step_control: int = 0) -> paddle.Tensor:
        """One forward and backward. The loss is not divided by the accumulation steps: B is the public divisor."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.autocast_smart_context_manager():
            loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach() / self.args.gradient_accumulation_steps

    # Checkpoints

    def _save_checkpoint(self, model: Any, metrics: Any = None) -> None:
        """The Trainer's checkpoint, with optimizer and account in a folder that is loaded without unpickling."""
        self._privacy_callback._remember(self.state)
        skip, self.args.ignore_save_lr_and_optim = self.args.ignore_save_lr_and_optim, True
        try:
            super()._save_checkpoint(model, metrics)
        finally:
            self.args.ignore_save_lr_and_optim = skip
        folder = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}", PRIVATE_FOLDER)
        save_checkpoint(folder, model=self.model, optimizer=self.optimizer, extra={"step": self.state.global_step})

    def _load_from_checkpoint(self, resume_from_checkpoint: Any = None) -> None:
        """Nothing: the weights come with the optimizer, from the same verified checkpoint."""

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        if checkpoint is None:
            return
        folder = os.path.join(checkpoint, PRIVATE_FOLDER)
        if not os.path.exists(os.path.join(folder, MANIFEST)):
            raise PrivacyError(
                f"{checkpoint} has no {PRIVATE_FOLDER}/{MANIFEST}, so what its steps spent is unknown; resume from a "
                "checkpoint of DPTrainer"
            )
        load_checkpoint(folder, model=self.model, optimizer=self.optimizer)

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Nothing: neither noise nor sampling has a state to restore, and dropout needs none."""


def _check_arguments(args: Any) -> None:
    """Refuses what the private step does not cover.

    Raises:
        PrivacyError: names the argument and what to do.
    """
    refused = {
        "fp16": (args.fp16, "scales the loss, and with it the gradients that are clipped; use bf16=True"),
        "amp_master_grad": (args.amp_master_grad, "collects gradients past the clipping; leave it off"),
        "sharding": (bool(args.sharding), "splits raw gradients; leave it off and use PrivacyArguments.sharding_stage"),
        "offload_optim": (getattr(args, "offload_optim", False), "is not supported; leave it off"),
        "skip_data_intervals": (bool(args.skip_data_intervals), "is about an order of rows; Poisson batches have none"),
        "unified_checkpoint": (
            bool(args.unified_checkpoint),
            "would save the optimizer without its account; leave it off",
        ),
    }
    for name, (found, why) in refused.items():
        if found:
            raise PrivacyError(f"TrainingArguments.{name} {why}")
    if args.dataloader_drop_last:
        warnings.warn("dataloader_drop_last has no meaning for Poisson batches", PrivacyWarning, stacklevel=3)
