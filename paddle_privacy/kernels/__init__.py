"""The numerical kernels of a private step, each in native code where that is available and wins.

Each function here takes Paddle tensors and picks the native operator (:mod:`.native` says whether there is one) or
the reference.
"""

from __future__ import annotations

from .noise_step import Noise, Rule, Update, add_noise, update_with_noise
from .reductions import (
    clip_and_sum,
    embedding_squared_norm,
    embedding_weighted_sum,
    ghost_squared_norm,
    norm_layer_sums,
    row_squared_norms,
    weighted_row_sum,
)

__all__ = [
    "Noise",
    "Rule",
    "Update",
    "add_noise",
    "clip_and_sum",
    "embedding_squared_norm",
    "embedding_weighted_sum",
    "ghost_squared_norm",
    "norm_layer_sums",
    "row_squared_norms",
    "update_with_noise",
    "weighted_row_sum",
]
