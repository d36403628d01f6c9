"""Differentially private training for PaddlePaddle 3.x."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paddle_privacy.errors import (
    LedgerError,
    PrivacyBudgetExceeded,
    PrivacyError,
    PrivacyWarning,
    UnsupportedEvent,
    UnsupportedLayer,
)
from paddle_privacy.gradients.rules import register_grad_rule
from paddle_privacy.ledger import Ledger
from paddle_privacy.noise import NoiseGenerator
from paddle_privacy.optimizer import DPSGD, DPAdam, DPAdamW, DPMomentum, dp_optimizer
from paddle_privacy.sampling import PoissonBatchSampler, PoissonDataLoader
from paddle_privacy.version import __version__

if TYPE_CHECKING:
    from paddle_privacy.adam_bc import DPAdamBC
    from paddle_privacy.engine import PrivacyEngine
    from paddle_privacy.gradients.independence import check_independence
    from paddle_privacy.gradients.per_sample import per_sample_gradients
    from paddle_privacy.gradients.rule_check import check_grad_rule
    from paddle_privacy.release import export_for_inference
    from paddle_privacy.schedules import ExponentialSchedule, LambdaSchedule, StepSchedule
    from paddle_privacy.validation import ModuleValidator

# Named here, imported when first asked for: most programs use few of them, and the import of the package stays short.
_ON_DEMAND = {
    "DPAdamBC": "adam_bc",
    "ExponentialSchedule": "schedules",
    "LambdaSchedule": "schedules",
    "ModuleValidator": "validation",
    "PrivacyEngine": "engine",
    "StepSchedule": "schedules",
    "check_grad_rule": "gradients.rule_check",
    "check_independence": "gradients.independence",
    "export_for_inference": "release",
    "per_sample_gradients": "gradients.per_sample",
}


def __getattr__(name: str) -> Any:
    if name == "federated":
        return import_module(f"{__name__}.federated")
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "DPSGD",
    "DPAdam",
    "DPAdamBC",
    "DPAdamW",
    "DPMomentum",
    "ExponentialSchedule",
    "LambdaSchedule",
    "Ledger",
    "LedgerError",
    "ModuleValidator",
    "NoiseGenerator",
    "PoissonBatchSampler",
    "PoissonDataLoader",
    "PrivacyBudgetExceeded",
    "PrivacyEngine",
    "PrivacyError",
    "PrivacyWarning",
    "StepSchedule",
    "UnsupportedEvent",
    "UnsupportedLayer",
    "__version__",
    "check_grad_rule",
    "check_independence",
    "dp_optimizer",
    "export_for_inference",
    "per_sample_gradients",
    "register_grad_rule",
]
