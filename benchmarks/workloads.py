"""The models of the step benchmark, and its rows: which model, batch and clipping, and what is aimed at.

Each maker returns a model and a function from the model to its loss on a fixed batch. `step.py` times the rows, and
`profile_step.py` and `peak_memory.py` look into them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import paddle
from paddle import nn

Made = tuple[nn.Layer, Callable[[nn.Layer], paddle.Tensor]]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        make: a model and its loss.
        batch: rows of one backward pass.
        clipping: of the private step.
        time, memory: what is aimed at, private over plain; 0 where nothing is.
        pieces: backward passes of one private step. With more than one, time is compared with that of private steps of
            one backward pass each, not with plain ones.
    """

    make: Callable[[], Made]
    batch: int
    clipping: str = "flat"
    time: float = 0.0
    memory: float = 0.0
    pieces: int = 1


def encoder(batch: int, length: int, *, layers: int = 6, width: int = 384, heads: int = 12, vocab: int = 18000) -> Made:
    """An ERNIE-shaped classifier: embeddings, post-norm transformer encoder, pooler, two classes."""

    class Classifier(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(vocab, width), nn.Embedding(512, width)
            self.norm = nn.LayerNorm(width)
            one = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, activation="gelu")
            self.encoder = nn.TransformerEncoder(one, layers)
            self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

        def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
            places = paddle.arange(ids.shape[1]).unsqueeze(0).expand(ids.shape)
            hidden = self.encoder(self.norm(self.words(ids) + self.positions(places)))
            return self.head(paddle.tanh(self.pooler(hidden[:, 0])))

    ids, labels = paddle.randint(1, vocab, [batch, length]), paddle.randint(0, 2, [batch])
    return Classifier(), lambda m: nn.functional.cross_entropy(m(ids), labels)


def bias_only(batch: int, length: int) -> Made:
    model, loss = encoder(batch, length)
    for name, p in model.named_parameters():
        p.stop_gradient = not name.endswith("bias")
    return model, loss


def last_layers(batch: int, length: int, trained: int = 2) -> Made:
    model, loss = encoder(batch, length)
    kept = tuple(f"encoder.layers.{i}." for i in range(6 - trained, 6)) + ("pooler", "head")
    for name, p in model.named_parameters():
        p.stop_gradient = not name.startswith(kept)
    return model, loss


def lora(batch: int, length: int, rank: int = 8) -> Made:
    """Rank-8 adapters on q and v beside frozen projections, as two small Linear layers each."""

    class Adapted(nn.Layer):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.weight.shape[0], rank, bias_attr=False)
            self.up = nn.Linear(rank, base.weight.shape[1], bias_attr=False)

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return self.base(x) + self.up(self.down(x))

    model, loss = encoder(batch, length)
    for p in model.parameters():
        p.stop_gradient = True
    for layer in model.encoder.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = (
            Adapted(layer.self_attn.q_proj),
            Adapted(layer.self_attn.v_proj),
        )
    for p in model.head.parameters():
        p.stop_gradient = False
    return model, loss


def resnet20(batch: int) -> Made:
    """ResNet-20 for 32×32 images with GroupNorm (He et al. 2016, §4.2)."""

    class Block(nn.Layer):
        def __init__(self, cin: int, cout: int, stride: int):
            super().__init__()
            self.conv1 = nn.Conv2D(cin, cout, 3, stride, 1, bias_attr=False)
            self.conv2 = nn.Conv2D(cout, cout, 3, 1, 1, bias_attr=False)
            self.norm1, self.norm2 = nn.GroupNorm(8, cout), nn.GroupNorm(8, cout)
            self.skip = nn.Conv2D(cin, cout, 1, stride, bias_attr=False) if stride > 1 or cin != cout else None

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            y = nn.functional.relu(self.norm1(self.conv1(x)))
            y = self.norm2(self.conv2(y))
            return nn.functional.relu(y + (x if self.skip is None else self.skip(x)))

    blocks = [
        Block(16 if i == 0 and s == 0 else (c if i else c // 2), c, 2 if i == 0 and s else 1)
        for s, c in enumerate((16, 32, 64))
        for i in range(3)
    ]
    model = nn.Sequential(
        nn.Conv2D(3, 16, 3, 1, 1, bias_attr=False),
        nn.GroupNorm(8, 16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2D(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    images, labels = paddle.randn([batch, 3, 32, 32]), paddle.randint(0, 10, [batch])
    return model, lambda m: nn.functional.cross_entropy(m(images), labels)


def lstm(batch: int, length: int) -> Made:
    class Classifier(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.lstm, self.head = nn.Embedding(10000, 128), nn.LSTM(128, 256), nn.Linear(256, 2)

        def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
            return self.head(self.lstm(self.words(ids))[0][:, -1])

    ids, labels = paddle.randint(1, 10000, [batch, length]), paddle.randint(0, 2, [batch])
    return Classifier(), lambda m: nn.functional.cross_entropy(m(ids), labels)


def big_embedding(batch: int, rows: int = 1_000_000, width: int = 64, length: int = 16) -> Made:
    class Classifier(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(rows, width), nn.Linear(width, 2)

        def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
            return self.head(self.table(ids).mean(axis=1))

    ids, labels = paddle.randint(0, rows, [batch, length]), paddle.randint(0, 2, [batch])
    return Classifier(), lambda m: nn.functional.cross_entropy(m(ids), labels)


def fresh_batches(batch: int, length: int, *, layers: int = 2, width: int = 64) -> Made:
    """A small encoder whose loss draws a new batch at every call: pieces of one logical batch are different tensors."""
    model, _ = encoder(batch, length, layers=layers, width=width, heads=4, vocab=2000)

    def loss(m: nn.Layer) -> paddle.Tensor:
        ids, labels = paddle.randint(1, 2000, [batch, length]), paddle.randint(0, 2, [batch])
        return nn.functional.cross_entropy(m(ids), labels)

    return model, loss


def small_encoder(batch: int, length: int) -> Made:
    return encoder(batch, length, layers=2, width=128, heads=4, vocab=2000)


ROWS: dict[str, Row] = {
    "encoder": Row(lambda: encoder(16, 128), 16, time=1.10, memory=1.10),
    "encoder-per-layer": Row(lambda: encoder(16, 128), 16, clipping="per_layer", time=1.07, memory=1.03),
    "encoder-T512": Row(lambda: encoder(4, 512), 4, time=1.15, memory=1.15),
    "last-2-layers": Row(lambda: last_layers(16, 128), 16, time=1.10, memory=1.10),
    "lora": Row(lambda: lora(16, 128), 16, time=1.07, memory=1.05),
    "bitfit": Row(lambda: bias_only(16, 128), 16, time=1.03, memory=1.02),
    "resnet20": Row(lambda: resnet20(64), 64, time=1.25, memory=1.25),
    "lstm": Row(lambda: lstm(32, 64), 32, time=1.6, memory=1.5),
    "embedding-1e6": Row(lambda: big_embedding(1024), 1024, time=2.0, memory=2.0),
    "logical-4096": Row(lambda: fresh_batches(32, 16), 32, pieces=128, time=1.03, memory=1.03),
}

# What `step.py --quick` runs: the same kinds of layers, in seconds.
QUICK: dict[str, Row] = {
    "encoder": Row(lambda: small_encoder(16, 64), 16),
    "encoder-per-layer": Row(lambda: small_encoder(16, 64), 16, clipping="per_layer"),
    "lora": Row(lambda: lora(4, 64), 4),
    "bitfit": Row(lambda: bias_only(4, 64), 4),
    "resnet20": Row(lambda: resnet20(8), 8),
    "lstm": Row(lambda: lstm(32, 32), 32),
    "embedding-1e5": Row(lambda: big_embedding(256, rows=100_000), 256),
}
