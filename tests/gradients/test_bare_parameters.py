"""Parameters that a layer uses itself, without a layer around them, against one-by-one autograd."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_privacy import PrivacyError, PrivacyWarning, UnsupportedLayer
from paddle_privacy.gradients.bare import BareTap
from paddle_privacy.gradients.capture import Capture
from paddle_privacy.gradients.factors import merge
from paddle_privacy.gradients.locate import locate
from tests.gradients.parity import assert_parity, built, captured, projected_loss, randomise, tensor
from tests.oracle import one_by_one

B = 4


def floats(*shape: int, seed: int = 1, batch: int = B):
    return tensor(np.random.default_rng(seed).standard_normal([batch, *shape]), "float64")


class Bare(nn.Layer):
    """A layer around a function of (layer, x) and parameters of the given shapes, between two ordinary layers."""

    def __init__(self, function, shapes: dict, features: int = 5, **children):
        super().__init__()
        self.first = nn.Linear(features, features)
        self.inner = Owner(function, shapes, children)

    def forward(self, *inputs):
        x, *rest = inputs
        return self.inner(self.first(x), *rest)


class Owner(nn.Layer):
    def __init__(self, function, shapes: dict, children: dict):
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            setattr(self, name, self.create_parameter(shape))
        for name, child in children.items():
            setattr(self, name, child())

    def forward(self, x, *rest, **named):
        return self.function(self, x, *rest, **named)


D = 5
# name: (function, shapes, children, the strategy expected of each bare parameter)
CASES = {
    "matmul": (lambda s, x: paddle.tanh(x @ s.w), {"w": [D, 3]}, {}, {"w": "product"}),
    "paddle.matmul": (lambda s, x: paddle.matmul(x, s.w), {"w": [D, 3]}, {}, {"w": "product"}),
    "matmul-transpose_y": (
        lambda s, x: paddle.matmul(x, s.w, transpose_y=True),
        {"w": [3, D]},
        {},
        {"w": "product"},
    ),
    "matmul-T": (lambda s, x: x @ s.w.T, {"w": [3, D]}, {}, {"w": "product"}),
    "matmul-t": (lambda s, x: x.matmul(s.w.t()), {"w": [3, D]}, {}, {"w": "product"}),
    "matmul-transpose": (lambda s, x: x.mm(s.w.transpose([1, 0])), {"w": [3, D]}, {}, {"w": "product"}),
    "matmul-T-transpose_y": (
        lambda s, x: paddle.matmul(x, s.w.T, transpose_y=True),
        {"w": [D, 3]},
        {},
        {"w": "product"},
    ),
    "twice": (lambda s, x: paddle.sin(x @ s.w) @ s.w.T, {"w": [D, 3]}, {}, {"w": "product"}),
    "low-rank": (lambda s, x: x @ s.a @ s.b * 0.5, {"a": [D, 2], "b": [2, 3]}, {}, {"a": "product", "b": "product"}),
    "functional-linear": (lambda s, x: F.linear(x, s.w, s.b), {"w": [D, 3], "b": [3]}, {}, None),
    "in-place-after-product": (lambda s, x: (x @ s.w).add_(x @ s.w), {"w": [D, D]}, {}, {"w": "product"}),
    "flattened-product": (
        lambda s, x: (x.reshape([-1, D]) @ s.w).reshape([x.shape[0], -1, 3]),
        {"w": [D, 3]},
        {},
        {"w": "replay"},
    ),
    "scale": (lambda s, x: x * s.gamma, {"gamma": [D]}, {}, {"gamma": "expanded"}),
    "scale-and-shift": (
        lambda s, x: s.gamma * x + s.beta,
        {"gamma": [D], "beta": [D]},
        {},
        {"gamma": "expanded", "beta": "expanded"},
    ),
    "scalar": (lambda s, x: x * s.t, {"t": [1]}, {}, {"t": "expanded"}),
    "cls-token": (
        lambda s, x: s.mix(paddle.concat([s.cls.expand([x.shape[0], -1, -1]), x], axis=1) + s.pos),
        {"cls": [1, 1, D], "pos": [1, 4, D]},
        {"mix": lambda: nn.Linear(D, D)},
        {"cls": "expanded", "pos": "expanded"},
    ),
    "pos-without-leading-one": (lambda s, x: x + s.pos, {"pos": [3, D]}, {}, {"pos": "expanded"}),
    "pos-sliced": (lambda s, x: x + s.pos[: x.shape[1]], {"pos": [7, D]}, {}, {"pos": "replay"}),
    "softmax-weights": (
        lambda s, x: (F.softmax(s.w, axis=0).reshape([-1, 1]) * x).sum(axis=1),
        {"w": [3]},
        {},
        {"w": "replay"},
    ),
    "einsum": (lambda s, x: paddle.einsum("btd,dp->btp", x, s.w), {"w": [D, 3]}, {}, {"w": "replay"}),
    "product-and-other-use": (lambda s, x: x @ s.w + s.w.sum(), {"w": [D, 3]}, {}, {"w": "replay"}),
    "all-ways-at-once": (
        lambda s, x: (x * s.g) @ s.w + s.pos[: x.shape[1]],
        {"g": [D], "w": [D, D], "pos": [7, D]},
        {},
        {"g": "expanded", "w": "product", "pos": "replay"},
    ),
    "norm-inside": (
        lambda s, x: s.norm(x + s.pos[: x.shape[1]]) * s.pos.mean(),
        {"pos": [7, D]},
        {"norm": lambda: nn.LayerNorm(D)},
        {"pos": "replay"},
    ),
    "recurrence-inside": (
        lambda s, x: s.lstm(x + s.pos[: x.shape[1]])[0],
        {"pos": [7, D]},
        {"lstm": lambda: nn.LSTM(D, 3)},
        {"pos": "replay"},
    ),
    "branch-not-taken": (lambda s, x: x * s.a if s.training else x @ s.w, {"a": [D], "w": [D, D]}, {}, None),
}


@pytest.mark.parametrize("positions", [3, B])
@pytest.mark.parametrize("name", CASES)
def test_bare_parameters_are_exact(name, positions):
    # Positions as many as samples: an axis mistaken for the batch would go unnoticed by its length.
    function, shapes, children, _ = CASES[name]
    if positions == B and name in ("cls-token", "pos-without-leading-one", "softmax-weights"):
        shapes = {k: [B + (name == "cls-token") if n in (3, 4) else n for n in v] for k, v in shapes.items()}
        if name == "cls-token":
            shapes["cls"] = [1, 1, D]
    model = randomise(built(lambda: Bare(function, shapes, **children), "float64"))
    assert_parity(model, projected_loss(), [floats(positions, D)], reduction="mean")
    assert_parity(model, projected_loss(), [floats(positions, D, batch=1)])


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case[3]])
def test_the_cheapest_way_is_found(name):
    function, shapes, children, expected = CASES[name]
    model = randomise(built(lambda: Bare(function, shapes, **children), "float64"))
    capture = Capture(locate(model.parameters(), model), lambda group: None)
    model(floats(3, D))
    (tap,) = [hook for hook in capture._hooks if isinstance(hook, BareTap)]
    (strategies,) = tap.strategies.values()
    assert dict(zip(shapes, (s.kind for s in strategies))) == expected
    capture.remove()


def test_two_rank_inputs():
    model = randomise(built(lambda: Bare(lambda s, x: x * s.g + x @ s.w, {"g": [D], "w": [D, D]}), "float64"))
    assert_parity(model, projected_loss(), [floats(D)])


def test_several_inputs_outputs_and_nested_structures():
    class Nested(nn.Layer):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(D, D)
            self.w = self.create_parameter([3])

        def forward(self, batch, *, shared):
            x = self.first(batch["x"])
            mixed = paddle.einsum("btd,t->bd", x, self.w) * shared
            return {"a": mixed, "b": [x * self.w.sum(), batch["n"]]}

    class Whole(nn.Layer):
        def __init__(self):
            super().__init__()
            self.nested = Nested()

        def forward(self, x, y):
            out = self.nested({"x": x, "n": y}, shared=paddle.arange(D).astype("float64"))
            return out["a"] + out["b"][0].sum(axis=1) * out["b"][1]

    model = randomise(built(Whole, "float64"))
    assert_parity(model, projected_loss(), [floats(3, D), floats(1)])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_output_computed_from_another_counts_once(dropout):
    class Pair(nn.Layer):
        def __init__(self):
            super().__init__()
            self.w = self.create_parameter([7, D])

        def forward(self, x):
            first = F.dropout(x + self.w[:3], dropout, training=self.training)
            return first, {"second": paddle.sin(first), "again": first}

    class Whole(nn.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.pair = nn.Linear(D, D), Pair()

        def forward(self, x):
            first, rest = self.pair(self.first(x))
            return first * rest["second"] + rest["again"]

    model, x, loss_fn = randomise(built(Whole, "float64")), floats(3, D), projected_loss()
    paddle.seed(3)
    factors = captured(model, loss_fn, [x])
    for i in range(B):
        paddle.seed(3)
        grads = paddle.grad([loss_fn(model, x)[i]], model.parameters())
        for (name, _), wanted in zip(model.named_parameters(), grads):
            np.testing.assert_allclose(factors[name].per_sample()[i].numpy(), wanted.numpy(), rtol=1e-9, atol=1e-12)


class TinyViT(nn.Layer):
    def __init__(self, dropout: float):
        super().__init__()
        self.patches = nn.Conv2D(3, 8, 4, stride=4)
        self.cls_token = self.create_parameter([1, 1, 8])
        self.pos_embed = self.create_parameter([1, 5, 8])
        self.drop = nn.Dropout(dropout)
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout)
        self.encoder = nn.TransformerEncoder(block, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose([0, 2, 1])
        x = paddle.concat([self.cls_token.expand([x.shape[0], -1, -1]), x], axis=1) + self.pos_embed
        return self.head(self.encoder(self.drop(x))[:, 0])


def test_vit_without_dropout():
    model = randomise(built(lambda: TinyViT(0.0), "float64"))
    assert_parity(model, projected_loss(), [floats(3, 8, 8)], reduction="mean")


@pytest.mark.parametrize("build", ["vit", "by-rows"])
def test_dropout_with_bare_parameters_is_exact_for_what_was_drawn(build):
    if build == "vit":
        model = randomise(built(lambda: TinyViT(0.4), "float64"))
        x = floats(3, 8, 8)
    else:
        # A sliced position table cannot be expanded, and dropout cannot be replayed.
        function = lambda s, x: F.dropout(x + s.pos[:3], 0.4, training=s.training)  # noqa: E731
        model = randomise(built(lambda: Bare(function, {"pos": [7, D]}), "float64"))
        x = floats(3, D)
    loss_fn = projected_loss()
    parameters = model.parameters()
    expected = []
    for i in range(B):
        paddle.seed(77)
        grads = paddle.grad([loss_fn(model, x)[i]], parameters, allow_unused=True)
        expected.append([g.numpy() for g in grads])
    paddle.seed(77)
    factors = captured(model, loss_fn, [x])
    for k, (name, _) in enumerate(model.named_parameters()):
        wanted = np.stack([row[k] for row in expected])
        found = factors[name].per_sample().numpy()
        assert np.abs(found - wanted).max() <= 1e-9 * max(1.0, np.abs(wanted).max()), name


def test_trial_and_replay_leave_the_random_state_as_plain_training_would():
    function = lambda s, x: F.dropout(x, 0.5, training=s.training) + s.pos[:3]  # noqa: E731
    draws = []
    for private in (False, True):
        paddle.seed(3)
        model = randomise(built(lambda: Bare(function, {"pos": [7, D]}), "float64"))
        capture = Capture(locate(model.parameters(), model), lambda group: None) if private else None
        paddle.seed(5)
        out = model(floats(3, D))
        out.sum().backward()
        if capture is not None:
            capture.finish()
            capture.remove()
        draws.append((out.numpy(), paddle.rand([3]).numpy()))
    np.testing.assert_array_equal(draws[0][0], draws[1][0])
    np.testing.assert_array_equal(draws[0][1], draws[1][1])


def test_a_layer_that_replay_does_not_reproduce_is_refused_with_what_to_do():
    model = randomise(built(lambda: Bare(lambda s, x: x + s.pos[:3] / x.shape[0], {"pos": [7, D]}), "float64"))
    with pytest.raises(UnsupportedLayer, match="layer 'inner' .*register one with register_grad_rule"):
        captured(model, projected_loss(), [floats(3, D)])


class TiedModel(nn.Layer):
    """A language model whose parent multiplies by the embedding's weight."""

    def __init__(self, product, vocabulary: int = 7):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, D)
        self.mix = nn.Linear(D, D)
        self.product = product

    def forward(self, ids):
        return self.product(self, paddle.tanh(self.mix(self.embed(ids))))


TIED = {
    "transpose_y": lambda s, h: paddle.matmul(h, s.embed.weight, transpose_y=True),
    "T": lambda s, h: h @ s.embed.weight.T,
    "t()": lambda s, h: h @ s.embed.weight.t(),
    "functional-linear": lambda s, h: F.linear(h, s.embed.weight.T),
    "bias-too": lambda s, h: F.linear(h * s.mix.bias, s.embed.weight.T),
}


@pytest.mark.parametrize("name", TIED)
def test_a_head_that_multiplies_by_the_embedding_carries_the_cross_term(name):
    ids = paddle.to_tensor(np.random.default_rng(0).integers(0, 7, [B, 6]))
    model = randomise(built(lambda: TiedModel(TIED[name]), "float64"))
    for reduction in ("sum", "mean"):
        factors = assert_parity(model, projected_loss(), [ids], reduction=reduction)
        assert set(factors) == {n for n, _ in model.named_parameters()}


def test_a_functional_use_that_is_no_product_is_differentiated_row_by_row_and_said():
    again = lambda s, h: F.embedding(paddle.argmax(h, -1), s.embed.weight) * h  # noqa: E731
    model = randomise(built(lambda: TiedModel(again), "float64"))
    ids = paddle.to_tensor(np.random.default_rng(0).integers(0, 7, [B, 6]))
    with pytest.warns(PrivacyWarning, match=r"\['embed.weight'\] are used in 'TiedModel' outside the layers that own"):
        assert_parity(model, projected_loss(), [ids])


class Positions(nn.Layer):
    """Looks positions up as [T], like minimal language models do."""

    def __init__(self, combine):
        super().__init__()
        self.embed, self.positions = nn.Embedding(7, D), nn.Embedding(16, D)
        self.mix, self.combine = nn.Linear(D, D), combine

    def forward(self, ids):
        return self.mix(self.combine(self, self.embed(ids), paddle.arange(ids.shape[1])))


POSITIONS = {
    "added": (lambda s, x, at: x + s.positions(at), False),
    "keyword": (lambda s, x, at: x + s.positions(x=at), False),
    "twice": (lambda s, x, at: x * s.positions(at) + s.positions(at + 1), False),
    "pair-wise": (lambda s, x, at: x * s.positions((at.unsqueeze(1) - at).abs()).sum(axis=-2), False),
    "unsqueezed": (lambda s, x, at: x + s.positions(at).unsqueeze(0), True),
    "mean-over-positions": (lambda s, x, at: x + s.positions(at).mean(axis=0), True),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_lookups_that_all_samples_share(name):
    combine, slow = POSITIONS[name]
    model = randomise(built(lambda: Positions(combine), "float64"))
    ids = paddle.to_tensor(np.random.default_rng(0).integers(0, 7, [B, 6]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_parity(model, projected_loss(), [ids], reduction="mean")
    assert any("outside the layers that own them" in str(w.message) for w in said) == slow


def test_positions_that_have_the_length_of_the_batch_by_chance():
    combine = POSITIONS["added"][0]
    for lengths in ([6, B], [B, 6]):
        model = randomise(built(lambda: Positions(combine), "float64"))
        groups: list = []
        capture = Capture(locate(model.parameters(), model), groups.append)
        for steps in lengths:
            ids = paddle.to_tensor(np.random.default_rng(0).integers(0, 7, [B, steps]))
            projected_loss()(model, ids).sum().backward()
        capture.finish()
        for steps, group in zip(lengths, groups):
            ids = paddle.to_tensor(np.random.default_rng(0).integers(0, 7, [B, steps]))
            key = id(model.positions.weight)
            capture.remove()
            (wanted,) = one_by_one(model, projected_loss(), [ids], [model.positions.weight])
            np.testing.assert_allclose(merge(group.factors[key]).per_sample().numpy(), wanted, rtol=1e-9, atol=1e-12)


def test_one_table_for_positions_and_for_samples_is_refused_where_they_cannot_be_told_apart():
    class Both(nn.Layer):
        def __init__(self):
            super().__init__()
            self.table, self.mix = nn.Embedding(9, D), nn.Linear(D, D)

        def forward(self, x, kinds=None):
            return self.mix(x + self.table(paddle.arange(x.shape[1]) if kinds is None else kinds))

    model = randomise(built(Both, "float64"))
    capture = Capture(locate(model.parameters(), model), lambda group: None)
    model(floats(3, D)).sum().backward()
    with pytest.raises(UnsupportedLayer, match="use one layer for positions and another for what differs"):
        model(floats(B, D), paddle.to_tensor([3, 1, 4, 1]))
    capture.remove()


def test_a_table_that_all_samples_share():
    class Bias(nn.Layer):
        """Relative position biases: a layer that is called without any tensor."""

        def __init__(self):
            super().__init__()
            self.table = self.create_parameter([11, 2])

        def forward(self, steps):
            at = paddle.arange(steps)
            return self.table[(at.unsqueeze(1) - at + 5).flatten()].reshape([steps, steps, 2])

    class Attention(nn.Layer):
        def __init__(self):
            super().__init__()
            self.project, self.bias = nn.Linear(D, D), Bias()

        def forward(self, x):
            h = self.project(x)
            return F.softmax(h @ h.transpose([0, 2, 1]) + self.bias(x.shape[1]).sum(axis=-1), axis=-1) @ h

    with pytest.warns(PrivacyWarning, match=r"\['bias.table'\]"):
        assert_parity(randomise(built(Attention, "float64")), projected_loss(), [floats(6, D)])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_use_that_the_first_batch_did_not_have_is_refused(transposed):
    def function(s, x):
        w = s.w.T if transposed else s.w
        return x @ w + (w.sum() if getattr(s, "later", False) else 0.0)

    model = randomise(built(lambda: Bare(function, {"w": [D, D]}), "float64"))
    capture = Capture(locate(model.parameters(), model), lambda group: None)
    model(floats(3, D)).sum().backward()
    capture.finish()
    model.inner.later = True
    model(floats(3, D, seed=2)).sum().backward()
    with pytest.raises(PrivacyError, match="parameter 'inner.w' was used in another way than at the first batch"):
        capture.finish()
    capture.remove()


def test_weight_norm_is_exact_and_spectral_norm_refused_with_a_reason():
    model = built(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(D, 4)), nn.Tanh(), nn.Linear(4, 2)), "float64")
    with pytest.warns(PrivacyWarning, match="each step costs as many backward passes as there are samples"):
        factors = assert_parity(model, projected_loss(), [floats(D)])
    assert {"0.weight_g", "0.weight_v"} <= set(factors)

    spectral = nn.Sequential(nn.utils.spectral_norm(nn.Linear(D, 4)), nn.Linear(4, 2))

    class Functional(nn.Layer):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(D, 4), nn.SpectralNorm([D, 4])

        def forward(self, x):
            return paddle.matmul(x, self.norm(self.linear.weight))

    for model, place in ((spectral, r"layer '0' \(Linear\)"), (Functional(), r"layer 'norm' \(SpectralNorm\)")):
        with pytest.raises(UnsupportedLayer, match=place + ": spectral normalisation runs a power iteration"):
            Capture(locate(model.parameters(), model), lambda group: None)


@pytest.mark.parametrize("name", ["vit", "cls-token", "pos-sliced", "matmul-T", "tied"])
def test_nothing_is_left_behind(name):
    from paddle_privacy.gradients.stand_in import StandIn
    from paddle_privacy.gradients.tap import Call

    def left() -> int:
        gc.collect()
        return sum(type(x) in (StandIn, Call) for x in gc.get_objects())

    inputs = floats(3, D)
    if name == "vit":
        model, inputs = randomise(built(lambda: TinyViT(0.1), "float64")), floats(3, 8, 8)
    elif name == "tied":
        model = randomise(built(lambda: TiedModel(TIED["T"]), "float64"))
        inputs = paddle.to_tensor(np.random.default_rng(0).integers(0, 7, [B, 6]))
    else:
        function, shapes, children, _ = CASES[name]
        model = randomise(built(lambda: Bare(function, shapes, **children), "float64"))
    parameters, before = [id(p) for p in model.parameters()], left()
    captured(model, projected_loss(), [inputs])
    assert [id(p) for p in model.parameters()] == parameters
    assert left() == before
