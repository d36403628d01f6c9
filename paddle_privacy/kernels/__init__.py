"""The numerical kernels of a private step, each in native code where that is available and wins.

Each function here takes Paddle tensors and picks the native op or the reference of :mod:`.reference`.
"""

from __future__ import annotations

from .reference import add_noise

__all__ = ["add_noise"]
