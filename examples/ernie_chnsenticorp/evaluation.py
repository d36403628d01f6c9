"""Loss and accuracy on held-out rows. Those rows are not protected by ε; the training rows are."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import paddle
from batches import EncodedRows, Join, by_length
from paddle.nn import functional as F

BATCH = 128


class Score(NamedTuple):
    loss: float
    """Mean cross-entropy in nats."""
    correct: np.ndarray[Any, Any]
    """bool ``[rows]``, in the order of the rows."""

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())


def evaluate(network: Any, rows: EncodedRows, join: Join) -> Score:
    """Scores ``network`` without dropout, and leaves it in training mode."""
    correct = np.zeros(len(rows), dtype=bool)
    loss_sum = 0.0
    network.eval()
    with paddle.no_grad():
        for chosen in by_length(rows, BATCH):
            inputs, labels = join([rows[row] for row in chosen])
            scores = network(*map(paddle.to_tensor, inputs))
            loss_sum += float(F.cross_entropy(scores, paddle.to_tensor(labels), reduction="sum"))
            correct[chosen] = scores.argmax(-1).numpy() == labels
    network.train()
    return Score(loss_sum / len(rows), correct)
