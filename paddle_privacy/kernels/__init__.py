"""The numerical kernels of a private step, each in native code where that is available and wins.

Each function here takes Paddle tensors and picks the native op or the reference of :mod:`.reference`.
"""

from __future__ import annotations

from .reference import (
    add_noise,
    embedding_squared_norm,
    embedding_weighted_sum,
    ghost_squared_norm,
    row_squared_norms,
    weighted_row_sum,
)

__all__ = [
    "add_noise",
    "embedding_squared_norm",
    "embedding_weighted_sum",
    "ghost_squared_norm",
    "row_squared_norms",
    "weighted_row_sum",
]
