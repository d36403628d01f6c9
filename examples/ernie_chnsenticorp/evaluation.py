"""Loss and accuracy of the model on held-out rows. Those rows are not protected by ε; the training rows are."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import paddle
from batches import EncodedRows
from ernie import logits, pad
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


def evaluate(model: Any, rows: EncodedRows, pad_id: int) -> Score:
    """Rows of similar length share a batch, so that little of it is padding."""
    order = sorted(range(len(rows)), key=lambda i: len(rows.ids[i]))
    correct = np.zeros(len(rows), dtype=bool)
    loss_sum = 0.0
    model.eval()
    with paddle.no_grad():
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            truth = np.array([rows.labels[i] for i in chosen])
            scores = logits(model, paddle.to_tensor(pad([rows.ids[i] for i in chosen], pad_id)))
            loss_sum += float(F.cross_entropy(scores, paddle.to_tensor(truth), reduction="sum"))
            correct[chosen] = scores.argmax(-1).numpy() == truth
    model.train()
    return Score(loss_sum / len(rows), correct)
