"""`--clip-norm auto`: a clip norm read off the gradient norms of a few rows, at the initial weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
from batches import EncodedRows, Join
from paddle.nn import functional as F

PERCENTILE = 90
ROWS = 256


def gradient_norms(network: Any, rows: EncodedRows, join: Join) -> list[float]:
    """L2 norm of the loss gradient of each row alone, over all trainable parameters.

    One plain backward pass a row: a reference that owes nothing to the code that clips.
    """
    trainable = [parameter for parameter in network.parameters() if not parameter.stop_gradient]
    norms = []
    for row in range(len(rows)):
        inputs, labels = join([rows[row]])
        F.cross_entropy(network(*map(paddle.to_tensor, inputs)), paddle.to_tensor(labels)).backward()
        squares = [float((p.grad.astype("float64") ** 2).sum()) for p in trainable if p.grad is not None]
        norms.append(math.sqrt(sum(squares)))
        for parameter in trainable:
            parameter.clear_gradient(set_to_zero=False)
    return norms


def percentile_clip_norm(network: Any, rows: EncodedRows, join: Join) -> float:
    """The 90th percentile of :func:`gradient_norms`. It depends on the rows and is not covered by ε."""
    return float(np.percentile(gradient_norms(network, rows, join), PERCENTILE))
