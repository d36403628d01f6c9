"""Losses and class probabilities of rows under a Paddle classifier, for membership scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def losses_and_probabilities(
    model: Any, batches: Iterable[tuple[Any, Any]], forward: Callable[[Any, Any], Any] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Cross-entropy per row [rows], and probabilities [rows, classes], in evaluation mode; both float64.

    Args:
        model: a ``paddle.nn.Layer``.
        batches: ``(inputs, labels)``; labels are class numbers, shape [rows of the batch].
        forward: ``forward(model, inputs)`` gives logits [rows of the batch, classes]; ``model(inputs)`` by default.
    """
    import paddle

    training = model.training
    model.eval()
    losses, probabilities = [], []
    try:
        with paddle.no_grad():
            for inputs, labels in batches:
                logits = model(inputs) if forward is None else forward(model, inputs)
                scores = np.asarray(logits.astype("float64").numpy())
                truth = np.asarray(labels.numpy() if hasattr(labels, "numpy") else labels).reshape(-1)
                shifted = scores - scores.max(axis=1, keepdims=True)
                log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
                losses.append(-log_p[np.arange(len(truth)), truth])
                probabilities.append(np.exp(log_p))
    finally:
        if training:
            model.train()
    return np.concatenate(losses), np.concatenate(probabilities)
