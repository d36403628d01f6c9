"""``paddle.Model.fit`` with ε in the progress bar.

A private optimizer works in ``model.prepare`` as any other. The callback adds the display, and refuses the settings
of ``fit`` under which an update would not be what the accountant takes it for.
"""

from __future__ import annotations

from typing import Any

from paddle.callbacks import ProgBarLogger

from paddle_privacy.errors import PrivacyError
from paddle_privacy.optimizer import PrivateOptimizer
from paddle_privacy.sampling import PoissonBatchSampler


class PrivacyCallback(ProgBarLogger):
    """Paddle's progress bar with ``epsilon``; takes the place of the default one.

    Args:
        delta: δ at which ε is stated; by default the optimizer's ``target_delta``.
        log_freq, verbose: as in ``paddle.callbacks.ProgBarLogger``.

    ``epsilon`` also stands in the ``logs`` of callbacks that come later in the list.
    """

    def __init__(self, delta: float | None = None, *, log_freq: int = 10, verbose: int = 2) -> None:
        super().__init__(log_freq, verbose)
        self.delta = delta

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = private_optimizer(self.model)
        optimizer.get_privacy_spent(self.delta)  # a missing delta is said now, not after the first batches
        _check_fit(self.model, optimizer)
        if "epsilon" not in self.params["metrics"]:
            self.params["metrics"].append("epsilon")
        super().on_train_begin(logs)

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if (self.train_step + 1) % self.log_freq == 0:
            self._add_epsilon(logs)
        super().on_train_batch_end(step, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._add_epsilon(logs)
        super().on_epoch_end(epoch, logs)

    def _add_epsilon(self, logs: Any) -> None:
        if logs is not None:
            logs["epsilon"] = private_optimizer(self.model).get_privacy_spent(self.delta).epsilon


def private_optimizer(model: Any) -> PrivateOptimizer:
    """The private optimizer of a prepared ``paddle.Model``.

    Raises:
        PrivacyError: it was prepared with another kind.
    """
    optimizer = model._optimizer
    if not isinstance(optimizer, PrivateOptimizer):
        raise PrivacyError(
            f"model.prepare() was given {type(optimizer).__name__}, which trains without privacy; give it DPSGD, "
            "DPAdamW or dp_optimizer(...)"
        )
    return optimizer


def _check_fit(model: Any, optimizer: PrivateOptimizer) -> None:
    if model._adapter._amp_level != "O0":
        raise PrivacyError(
            "amp_configs scales the loss, and with it the gradients that are clipped; leave it out and use "
            "paddle.amp.auto_cast(dtype='bfloat16') inside the network's forward"
        )
    pieces = getattr(model, "_accumulate", 1) or 1
    sampler = optimizer.spending.scheme.sampler if optimizer.spending.scheme is not None else None
    if pieces > 1 and isinstance(sampler, PoissonBatchSampler) and sampler.micro_batches != pieces:
        raise PrivacyError(
            f"accumulate_grad_batches={pieces} would join {pieces} independent Poisson batches, in which a row can be "
            f"several times; build PoissonBatchSampler(..., micro_batches={pieces}) with the batch size of the whole"
        )
