"""`--freeze-layers` over the whole encoder: what it computes never changes, so it is computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from batches import EncodedRows, by_length, pad_tokens
from paddle import nn

BATCH = 64


class Head(nn.Layer):
    """The pooler and classifier of ``model``, the layers themselves and not copies: ``[B, d] -> [B, classes]``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pooler = model.base_model.pooler
        self.dropout = model.dropout
        self.classifier = model.classifier

    def forward(self, first_token_states: paddle.Tensor) -> paddle.Tensor:
        # The pooler takes the first of the positions it is given.
        return self.classifier(self.dropout(self.pooler(first_token_states.unsqueeze(1))))


def first_token_states(model: Any, rows: EncodedRows, pad_id: int) -> EncodedRows:
    """The encoder's output at [CLS], float32 ``[d]``, in place of each row's tokens. Without dropout."""
    join = pad_tokens(pad_id)
    states: list[Any] = [None] * len(rows)
    model.eval()
    with paddle.no_grad():
        for chosen in by_length(rows, BATCH):
            input_ids, _ = join([rows[row] for row in chosen])
            output = model.base_model(paddle.to_tensor(input_ids))[0][:, 0]
            for row, state in zip(chosen, output.numpy()):
                states[row] = np.ascontiguousarray(state)
    model.train()
    return EncodedRows(states, rows.labels)
