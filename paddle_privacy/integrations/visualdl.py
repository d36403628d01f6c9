"""Curves of a private run in VisualDL.

What is under ``privacy/`` follows from the noisy updates and may be shown to anybody who may see the model. The loss
of a batch, the gradient norms and the share of clipped rows are functions of the raw data that ε does not cover;
they appear only on request, under ``not_private/``.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import numpy as np
from paddle.callbacks import Callback

from paddle_privacy.checkpoint import PathLike
from paddle_privacy.clipping import AdaptiveClipping
from paddle_privacy.errors import PrivacyWarning
from paddle_privacy.integrations.hapi import private_optimizer
from paddle_privacy.optimizer import PrivateOptimizer

QUANTILES = (0.1, 0.5, 0.9)


class PrivacyLogger:
    """Writes the scalars of a private optimizer for VisualDL; for loops of one's own.

    Args:
        log_dir: VisualDL's directory.
        optimizer: a private optimizer.
        delta: δ at which ε is stated; by default the optimizer's ``target_delta``.
        raw_statistics: also write, under ``not_private/``, the loss passed to :meth:`step`, quantiles of the gradient
            norms before clipping, and the share of rows that were clipped. These are not noised.

    =========================================  ==================================================================
    tag                                        covered by ε
    =========================================  ==================================================================
    ``privacy/epsilon``                        yes
    ``privacy/noise_multiplier``               yes
    ``privacy/clip_norm``                      yes; with adaptive clipping it is itself a noised estimate of the
                                               quantile of gradient norms that the tag names
    ``privacy/learning_rate``                  yes
    ``privacy/clip_fraction (noised)``         yes; with adaptive clipping, which releases it
    ``not_private/loss``                       no
    ``not_private/gradient_norm_quantile_*``   no
    ``not_private/clip_fraction``              no
    =========================================  ==================================================================

    Raises:
        ImportError: VisualDL is not installed.
    """

    def __init__(
        self,
        log_dir: PathLike,
        optimizer: PrivateOptimizer,
        *,
        delta: float | None = None,
        raw_statistics: bool = False,
    ) -> None:
        try:
            from visualdl import LogWriter
        except ImportError as error:
            raise ImportError("PrivacyLogger needs VisualDL: pip install 'paddle-privacy[visualdl]'") from error
        optimizer.get_privacy_spent(delta)
        if raw_statistics:
            warnings.warn(
                "raw_statistics=True writes losses and gradient norms of the training rows, which epsilon does not "
                "cover; keep these curves as confidential as the data",
                PrivacyWarning,
                stacklevel=2,
            )
        self.optimizer, self.delta, self.raw_statistics = optimizer, delta, raw_statistics
        self._writer = LogWriter(os.fspath(log_dir))
        self._written = optimizer.spending.steps
        self._bound = float(optimizer.clipping.sensitivity)

    def step(self, loss: Any = None) -> None:
        """Write what the last ``optimizer.step()`` did; nothing where it was not an update (an unfinished batch)."""
        number = self.optimizer.spending.steps
        if number == self._written:
            return
        is_next, self._written = number == self._written + 1, number
        for tag, value in self._private_scalars(is_next).items():
            self._writer.add_scalar(f"privacy/{tag}", value, number)
        if self.raw_statistics:
            for tag, value in self._raw_scalars(loss).items():
                self._writer.add_scalar(f"not_private/{tag}", value, number)

    def _private_scalars(self, is_next: bool) -> dict[str, float]:
        optimizer, clipping = self.optimizer, self.optimizer.clipping
        bound, before = float(clipping.sensitivity), self._bound
        self._bound = bound
        scalars = {
            "epsilon": optimizer.get_privacy_spent(self.delta).epsilon,
            "noise_multiplier": float(optimizer.noise_multiplier or 0.0),
            "learning_rate": float(optimizer.get_lr()),
        }
        if not isinstance(clipping, AdaptiveClipping):
            return {**scalars, "clip_norm": bound}
        if is_next:
            # Read back from the move of the bound, which was computed from the noised count.
            below = clipping.quantile - math.log(bound / before) / clipping.learning_rate
            scalars["clip_fraction (noised)"] = 1.0 - below
        return {**scalars, f"clip_norm (noised {clipping.quantile:g}-quantile of gradient norms)": bound}

    def _raw_scalars(self, loss: Any) -> dict[str, float]:
        scalars = {} if loss is None else {"loss": float(np.mean(loss))}
        norms = self.optimizer.last_norms
        if norms is None or 0 in norms.shape:
            return scalars
        values = norms.numpy().astype(np.float64)
        values = np.sqrt((values**2).reshape([len(values), -1]).sum(1))
        for q in QUANTILES:
            scalars[f"gradient_norm_quantile_{q:g}"] = float(np.quantile(values, q))
        scalars["clip_fraction"] = float((values > float(self.optimizer.clipping.sensitivity)).mean())
        return scalars

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> PrivacyLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VisualDLCallback(Callback):
    """:class:`PrivacyLogger` for ``paddle.Model.fit``; its arguments but the optimizer, which is the model's."""

    def __init__(self, log_dir: PathLike, *, delta: float | None = None, raw_statistics: bool = False) -> None:
        super().__init__()
        self.log_dir, self.delta, self.raw_statistics = log_dir, delta, raw_statistics
        self._logger: PrivacyLogger | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._logger = PrivacyLogger(
            self.log_dir, private_optimizer(self.model), delta=self.delta, raw_statistics=self.raw_statistics
        )

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        assert self._logger is not None
        self._logger.step((logs or {}).get("loss"))

    def on_train_end(self, logs: Any = None) -> None:
        if self._logger is not None:
            self._logger.close()
            self._logger = None
