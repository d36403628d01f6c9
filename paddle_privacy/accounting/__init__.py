"""Privacy accounting: events in, ε or δ out. Imports neither Paddle nor plotting."""

from __future__ import annotations

from .accountant import Accountant
from .calibration import (
    calibrate_noise_multiplier,
    compute_delta,
    compute_epsilon,
    default_delta,
    get_accountant,
    get_noise_multiplier,
    get_sample_rate,
    get_steps,
    steps_for_epochs,
)
from .events import (
    Composed,
    Event,
    FixedSize,
    Gaussian,
    PoissonSampled,
    SelfComposed,
    ShuffledEpoch,
    TruncatedPoisson,
)
from .pld_accountant import PLDAccountant
from .rdp_accountant import RDPAccountant, epsilon_curve
from .zcdp import ZCDPAccountant

__all__ = [
    "Accountant",
    "Composed",
    "Event",
    "FixedSize",
    "Gaussian",
    "PLDAccountant",
    "PoissonSampled",
    "RDPAccountant",
    "SelfComposed",
    "ShuffledEpoch",
    "TruncatedPoisson",
    "ZCDPAccountant",
    "calibrate_noise_multiplier",
    "compute_delta",
    "compute_epsilon",
    "default_delta",
    "epsilon_curve",
    "get_accountant",
    "get_noise_multiplier",
    "get_sample_rate",
    "get_steps",
    "steps_for_epochs",
]
