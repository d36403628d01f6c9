"""Differentially private training for PaddlePaddle 3.x."""

from __future__ import annotations

from paddle_privacy.errors import (
    LedgerError,
    PrivacyBudgetExceeded,
    PrivacyError,
    PrivacyWarning,
    UnsupportedEvent,
    UnsupportedLayer,
)
from paddle_privacy.gradients.independence import check_independence
from paddle_privacy.gradients.rules import register_grad_rule
from paddle_privacy.noise import NoiseGenerator
from paddle_privacy.optimizer import DPSGD, DPAdam, DPAdamW, DPMomentum, dp_optimizer
from paddle_privacy.sampling import PoissonBatchSampler
from paddle_privacy.version import __version__

__all__ = [
    "DPSGD",
    "DPAdam",
    "DPAdamW",
    "DPMomentum",
    "LedgerError",
    "NoiseGenerator",
    "PoissonBatchSampler",
    "PrivacyBudgetExceeded",
    "PrivacyError",
    "PrivacyWarning",
    "UnsupportedEvent",
    "UnsupportedLayer",
    "__version__",
    "check_independence",
    "dp_optimizer",
    "register_grad_rule",
]
