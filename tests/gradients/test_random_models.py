"""Random small models out of supported pieces: per-sample gradients equal one-by-one autograd."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from paddle import nn

from tests.gradients.parity import assert_parity, built, randomise, tensor

WIDTH = 4


class Residual(nn.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class ChannelsFirst(nn.Layer):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose([0, 2, 1])).transpose([0, 2, 1])


class First(nn.Layer):
    """The outputs of a recurrent layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Scale(nn.Layer):
    def __init__(self):
        super().__init__()
        self.gamma, self.beta = self.create_parameter([WIDTH]), self.create_parameter([1, 1, WIDTH])

    def forward(self, x):
        return x * self.gamma + self.beta


class Product(nn.Layer):
    def __init__(self, transposed):
        super().__init__()
        self.w, self.transposed = self.create_parameter([WIDTH, WIDTH]), transposed

    def forward(self, x):
        return paddle.matmul(x, self.w, transpose_y=True) if self.transposed else x @ self.w


class Positions(nn.Layer):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)

    def forward(self, x):
        return x + self.table(paddle.arange(x.shape[1]))


class Gate(nn.Layer):
    """Two uses of one linear layer, in place of a second one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(F.sigmoid(self.linear(x)) * x)


class Pool(nn.Layer):
    """Attention pooling with a bare query, broadcast back."""

    def __init__(self):
        super().__init__()
        self.query = self.create_parameter([WIDTH, 1])

    def forward(self, x):
        return x + (F.softmax(x @ self.query, axis=1) * x).sum(axis=1, keepdim=True)


PIECES = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear-no-bias": lambda: nn.Linear(WIDTH, WIDTH, bias_attr=False),
    "layer-norm": lambda: nn.LayerNorm(WIDTH),
    "group-norm": lambda: ChannelsFirst(nn.GroupNorm(2, WIDTH)),
    # With a large epsilon: over two equal positions a small one amplifies gradients by a factor of 10^10 in five uses.
    "instance-norm": lambda: ChannelsFirst(nn.InstanceNorm1D(WIDTH, epsilon=0.1)),
    "conv": lambda: ChannelsFirst(nn.Conv1D(WIDTH, WIDTH, 3, padding=1)),
    "conv-circular": lambda: ChannelsFirst(nn.Conv1D(WIDTH, WIDTH, 3, padding=1, padding_mode="circular")),
    "conv-grouped": lambda: ChannelsFirst(nn.Conv1D(WIDTH, WIDTH, 3, padding=1, groups=2)),
    "conv-transpose": lambda: ChannelsFirst(nn.Conv1DTranspose(WIDTH, WIDTH, 3, padding=1)),
    "prelu": lambda: nn.PReLU(),
    "lstm": lambda: First(nn.LSTM(WIDTH, WIDTH)),
    "gru": lambda: First(nn.GRU(WIDTH, WIDTH // 2, direction="bidirect")),
    "attention": lambda: nn.MultiHeadAttention(WIDTH, 2),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0),
    "scale": Scale,
    "product": lambda: Product(False),
    "product-transposed": lambda: Product(True),
    "positions": Positions,
    "gate": Gate,
    "pool": Pool,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
}


class Chain(nn.Layer):
    """Embeds ids, runs pieces (a repeated index runs the same piece again), and ends in logits or the tied table."""

    def __init__(self, names: list, order: list, residual: list, tied: bool):
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH, padding_idx=0)
        pieces = [PIECES[name]() for name in names]
        self.pieces = nn.LayerList([Residual(p) if r else p for p, r in zip(pieces, residual)])
        self.order, self.tied = [k % len(names) for k in order], tied
        if not tied:
            self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        x = self.embed(ids)
        for k in self.order:
            x = paddle.tanh(self.pieces[k](x)) + 0.1 * x
        return paddle.matmul(x, self.embed.weight, transpose_y=True) if self.tied else self.head(x)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4),
    order=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    residual=st.lists(st.booleans(), min_size=4, max_size=4),
    tied=st.booleans(),
    frozen=st.sets(st.integers(0, 12), max_size=3),
    batch=st.integers(1, 4),
    steps=st.integers(2, 5),
    reduction=st.sampled_from(["sum", "mean"]),
)
def test_any_chain(names, order, residual, tied, frozen, batch, steps, reduction):
    paddle.seed(0)
    model = randomise(built(lambda: Chain(names, order, residual, tied), "float64"))
    # What plain Paddle cannot differentiate: a recurrent layer or an instance norm that is frozen in part, an instance
    # norm whose input wants no gradient.
    fragile = [piece for piece in model.sublayers() if isinstance(piece, (nn.LSTM, nn.GRU, nn.InstanceNorm1D))]
    kept = {id(p) for piece in fragile for p in piece.parameters()} | ({id(model.embed.weight)} if fragile else set())
    for k, p in enumerate(model.parameters()):
        p.stop_gradient = k in frozen and id(p) not in kept
    assume(any(not p.stop_gradient for p in model.parameters()))
    ids = paddle.to_tensor(np.random.default_rng(1).integers(0, 7, [batch, steps]))

    def loss_fn(model, ids):
        out = model(ids)
        weights = np.random.default_rng(5).standard_normal([1, *out.shape[1:]])
        return (paddle.sin(out) * tensor(weights, "float64")).reshape([out.shape[0], -1]).sum(axis=1)

    assert_parity(model, loss_fn, [ids], reduction=reduction)
