"""`--clip-norm auto`: a clip norm read off the gradient norms of a few rows, at the initial weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from ernie import logits
from paddle.nn import functional as F

PERCENTILE = 90
ROWS = 256


def sample_rows(count: int, seed: int) -> list[int]:
    """Up to ``ROWS`` indices below ``count``, without repetition."""
    return np.random.default_rng(seed).permutation(count)[:ROWS].tolist()


def gradient_norms(model: Any, rows: Sequence[tuple[np.ndarray[Any, Any], int]]) -> list[float]:
    """L2 norm of the loss gradient of each row alone, over all trainable parameters.

    One plain backward pass a row: a reference that owes nothing to the code that clips.
    """
    trainable = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    norms = []
    for ids, label in rows:
        loss = F.cross_entropy(logits(model, paddle.to_tensor(ids[None])), paddle.to_tensor([label]))
        loss.backward()
        squares = [float((p.grad.astype("float64") ** 2).sum()) for p in trainable if p.grad is not None]
        norms.append(math.sqrt(sum(squares)))
        for parameter in trainable:
            parameter.clear_gradient(set_to_zero=False)
    return norms


def percentile_clip_norm(model: Any, rows: Sequence[tuple[np.ndarray[Any, Any], int]]) -> float:
    """The 90th percentile of :func:`gradient_norms`. It depends on the rows and is not covered by ε."""
    return float(np.percentile(gradient_norms(model, rows), PERCENTILE))
