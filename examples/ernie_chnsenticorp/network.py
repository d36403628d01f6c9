"""The network that is trained: from the first layer that can change to the scores, at the one position the head reads.

Layers that are frozen compute the same for a row in every epoch, so they are run once (:func:`frozen_states`) and the
network starts from their output. Of the last layer only the position that the head reads is computed: the others
would be thrown away. Scores are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from batches import EncodedRows, by_length, pad_tokens
from paddle import nn

BATCH = 64
FIRST = 0
"""Position of [CLS]."""


class Upper(nn.Layer):
    """Encoder layers from number ``start`` on, and the head; the layers of ``model`` themselves and not copies.

    Args:
        model: a PaddleNLP model with ``base_model.encoder.layers``.
        head: maps the state at ``position``, float32 ``[B, d]``, to scores ``[B, classes]``.
        start: layers before it are frozen, and their output is the input here.
        position: of the token whose state the head reads.
    """

    def __init__(self, model: Any, head: nn.Layer, start: int, position: int) -> None:
        super().__init__()
        self.layers = nn.LayerList(list(model.base_model.encoder.layers)[start:])
        self.head = head
        self.position = position

    def forward(self, states: paddle.Tensor, lengths: paddle.Tensor) -> paddle.Tensor:
        """Scores ``[B, classes]`` from states ``[B, T, d]`` of which the first ``lengths`` (int64 ``[B]``) are tokens.

        With no layers left, T is 1 and the state is the one the head reads.
        """
        if len(self.layers) == 0:
            return self.head(states[:, 0])
        return self.scores(states, paddle.arange(states.shape[1]).unsqueeze(0) >= lengths.unsqueeze(1))

    def scores(self, states: paddle.Tensor, padding: paddle.Tensor) -> paddle.Tensor:
        """From states ``[B, T, d]``; ``padding`` is bool ``[B, T]``."""
        mask = _attention_mask(padding)
        for layer in list(self.layers)[:-1]:
            states = layer(states, mask)
        return self.head(_at_position(self.layers[-1], states, mask, self.position))


class Whole(Upper):
    """The embeddings, all encoder layers and the head."""

    def __init__(self, model: Any, head: nn.Layer, position: int) -> None:
        super().__init__(model, head, 0, position)
        self.embeddings = model.base_model.embeddings
        self.pad_id = model.config.pad_token_id

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:  # type: ignore[override]  # nothing was run before
        """Scores ``[B, classes]`` from token ids ``[B, T]``."""
        return self.scores(self.embeddings(input_ids=input_ids), input_ids == self.pad_id)


def _attention_mask(padding: paddle.Tensor) -> paddle.Tensor:
    """What is added to attention scores, ``[B, 1, 1, T]``: -1e4, as in PaddleNLP, where there is no token."""
    return (padding.astype("float32") * -1e4).unsqueeze([1, 2])


def _at_position(layer: nn.Layer, states: paddle.Tensor, mask: paddle.Tensor, position: int) -> paddle.Tensor:
    """``layer(states, mask)[:, position]`` of a post-norm `nn.TransformerEncoderLayer`, for the price of that one."""
    here = states[:, position : position + 1]
    here = layer.norm1(here + layer.dropout1(layer.self_attn(here, states, states, mask)))
    inner = layer.linear2(layer.dropout(layer.activation(layer.linear1(here))))
    return layer.norm2(here + layer.dropout2(inner))[:, 0]


class PoolerHead(nn.Layer):
    """The pooler and classifier of a sequence classification model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pooler = model.base_model.pooler
        self.dropout = model.dropout
        self.classifier = model.classifier

    def forward(self, state: paddle.Tensor) -> paddle.Tensor:
        # The pooler takes the first of the positions it is given.
        return self.classifier(self.dropout(self.pooler(state.unsqueeze(1))))


class Probe(nn.Layer):
    """Two layers on what :func:`layer_features` makes of a text.

    Args:
        inputs: values of a text, of root mean square 1.
        hidden: units between the two layers.
        classes: scores.
    """

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        # Small, so that at first no row is classified for sure: such rows have no gradient to learn from.
        small = paddle.ParamAttr(initializer=nn.initializer.Normal(std=0.02))
        self.classifier = nn.Linear(hidden, classes, weight_attr=small)

    def forward(self, features: paddle.Tensor) -> paddle.Tensor:
        return self.classifier(nn.functional.relu(self.hidden(features)))


class WordHead(nn.Layer):
    """The masked-language-model head, asked about one word per class only.

    The scores of the words come from the frozen word embeddings, which are tied to the model's input.
    """

    def __init__(self, model: Any, word_ids: list[int]) -> None:
        super().__init__()
        predictions = model.cls.predictions
        self.transform, self.layer_norm = predictions.transform, predictions.layer_norm
        self.activation = predictions.activation
        output = model.get_output_embeddings()
        self._weight = paddle.gather(output.weight, paddle.to_tensor(word_ids)).detach()
        self._bias = paddle.gather(output.bias, paddle.to_tensor(word_ids)).detach()

    def forward(self, state: paddle.Tensor) -> paddle.Tensor:
        state = self.layer_norm(self.activation(self.transform(state)))
        return paddle.matmul(state, self._weight, transpose_y=True) + self._bias


def frozen_states(model: Any, rows: EncodedRows, pad_id: int, layers: int, position: int) -> EncodedRows:
    """In place of each row's tokens, what the first ``layers`` encoder layers make of them, float32 ``[T, d]``.

    Without dropout. Where these are all layers, ``[1, d]``: only the state at ``position`` is used.
    """
    base = model.base_model
    frozen = list(base.encoder.layers)[:layers]
    only = layers == len(base.encoder.layers)

    def run(ids: paddle.Tensor) -> paddle.Tensor:
        mask = _attention_mask(ids == pad_id)
        output = base.embeddings(input_ids=ids)
        for layer in frozen[:-1] if only else frozen:
            output = layer(output, mask)
        return _at_position(frozen[-1], output, mask, position).unsqueeze(1) if only else output

    return _without_gradients(model, rows, pad_id, run)


def layer_features(model: Any, rows: EncodedRows, pad_id: int) -> EncodedRows:
    """In place of each row's tokens, its state at [CLS] and its mean state in each encoder layer, float32 ``[1, 2Ld]``.

    Without dropout; scaled to a root mean square of 1, so that no row's gradient is long because its states are.
    """
    base = model.base_model

    def run(ids: paddle.Tensor) -> paddle.Tensor:
        padding = ids == pad_id
        mask = _attention_mask(padding)
        tokens = (~padding).astype("float32").unsqueeze(-1)
        output, found = base.embeddings(input_ids=ids), []
        for layer in base.encoder.layers:
            output = layer(output, mask)
            found += [output[:, FIRST], (output * tokens).sum(1) / tokens.sum(1)]
        features = paddle.concat(found, axis=-1)
        return (features / features.square().mean(-1, keepdim=True).sqrt()).unsqueeze(1)

    return _without_gradients(model, rows, pad_id, run)


def features_width(model: Any) -> int:
    """2Ld of :func:`layer_features`."""
    return 2 * len(model.base_model.encoder.layers) * int(model.config.hidden_size)


def _without_gradients(model: Any, rows: EncodedRows, pad_id: int, run: Callable[[Any], paddle.Tensor]) -> EncodedRows:
    """``run`` on padded token ids ``[B, T]``, of whose ``[B, T, d]`` (or ``[B, 1, d]``) each row keeps its tokens."""
    join = pad_tokens(pad_id)
    states: list[Any] = [None] * len(rows)
    model.eval()
    with paddle.no_grad():
        for chosen in by_length(rows, BATCH):
            (input_ids,), _ = join([rows[row] for row in chosen])
            for row, state in zip(chosen, run(paddle.to_tensor(input_ids)).numpy()):
                states[row] = np.ascontiguousarray(state[: len(rows.inputs[row])])
    model.train()
    return EncodedRows(states, rows.labels)
