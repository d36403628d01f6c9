"""Recurrent layers against one-by-one autograd."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn

from tests.gradients.parity import assert_parity, built, captured, projected_loss, randomise, tensor

B, T, D, H = 3, 5, 4, 6
KINDS = {"rnn": nn.SimpleRNN, "lstm": nn.LSTM, "gru": nn.GRU}


def floats(*shape: int, seed: int = 1):
    return tensor(np.random.default_rng(seed).standard_normal([B, *shape]), "float64")


@pytest.fixture
def float64_states():
    """Cells make their own initial states in the default dtype."""
    paddle.set_default_dtype("float64")
    yield
    paddle.set_default_dtype("float32")


class Sequence(nn.Layer):
    """Embeds, runs the recurrent layer batch first, and returns the outputs next to the final states, batch first."""

    def __init__(self, recurrent: nn.Layer, time_major: bool = False, features: int = D):
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.recurrent, self.time_major = recurrent, time_major

    def forward(self, x, lengths=None, *states):
        x = self.embed(x)
        if self.time_major:
            x = x.transpose([1, 0, 2])
        states = tuple(s.transpose([1, 0, 2]) for s in states)
        initial = (states if len(states) > 1 else states[0]) if states else None
        out, last = self.recurrent(x, initial, lengths)
        if self.time_major:
            out = out.transpose([1, 0, 2])
        flat = [s.transpose([1, 0, 2]).flatten(1) for s in (last if isinstance(last, tuple) else (last,))]
        return paddle.concat([out.flatten(1), *flat], axis=1)


OPTIONS = {
    "plain": {},
    "two-layers": {"num_layers": 2},
    "bidirectional": {"direction": "bidirect"},
    "deep-bidirectional": {"num_layers": 2, "direction": "bidirect"},
    "time-major": {"time_major": True},
    "deep-time-major": {"num_layers": 2, "direction": "bidirect", "time_major": True},
}


@pytest.mark.parametrize("lengths", [None, [5, 2, 3]])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_fused_layers(kind, option, lengths):
    options = OPTIONS[option]
    model = built(lambda: Sequence(KINDS[kind](D, H, **options), options.get("time_major", False)), "float64")
    inputs = [floats(T, D)] if lengths is None else [floats(T, D), paddle.to_tensor(lengths)]
    factors = assert_parity(randomise(model), projected_loss(), inputs, reduction="mean")
    assert len(factors) == len(model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_relu_float32_and_learned_initial_states(kind):
    options = {"activation": "relu"} if kind == "rnn" else {}
    model = randomise(built(lambda: Sequence(KINDS[kind](D, H, **options)), "float32"))
    x = tensor(np.random.default_rng(1).standard_normal([B, T, D]), "float32")
    assert_parity(model, projected_loss("float32"), [x], dtype="float32")

    class FromEncoder(nn.Layer):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(D, H)
            self.sequence = Sequence(KINDS[kind](D, H))

        def forward(self, x):
            state = paddle.tanh(self.encode(x.mean(axis=1))).unsqueeze(1)
            return self.sequence(x, None, *[state * (k + 1) for k in range(2 if kind == "lstm" else 1)])

    assert_parity(randomise(built(FromEncoder, "float64")), projected_loss(), [floats(T, D)])


@pytest.mark.parametrize("kind", KINDS)
def test_padded_bidirectional_sequences_from_given_states(kind):
    """Paddle's own gradient of this configuration is wrong; that of the sequences without their padding is not."""
    lengths = [5, 2, 3]
    model = randomise(built(lambda: Sequence(KINDS[kind](D, H, direction="bidirect")), "float64"))
    states = [floats(2, H, seed=8 + k) for k in range(2 if kind == "lstm" else 1)]
    x = floats(T, D)

    def losses(model, x, lengths, *states):
        out = model(x, lengths, *states)
        steps, features = x.shape[1], 2 * H
        weights = tensor(np.random.default_rng(0).standard_normal([1, T * features]), "float64")
        last = tensor(np.random.default_rng(1).standard_normal([1, out.shape[1] - steps * features]), "float64")
        return (out[:, : steps * features] * weights[:, : steps * features]).sum(axis=1) + (
            out[:, steps * features :] * last
        ).sum(axis=1)

    factors = captured(model, losses, [x, paddle.to_tensor(lengths), *states])
    for i, length in enumerate(lengths):
        loss = losses(model, x[i : i + 1, :length], None, *[s[i : i + 1] for s in states])
        for (name, _), wanted in zip(model.named_parameters(), paddle.grad([loss], model.parameters())):
            np.testing.assert_allclose(factors[name].per_sample()[i].numpy(), wanted.numpy(), rtol=1e-9, atol=1e-12)


def test_dropout_between_layers_is_exact_for_what_was_drawn():
    options = {"num_layers": 3, "dropout": 0.5, "time_major": True}
    model = randomise(built(lambda: Sequence(nn.LSTM(D, H, **options), True), "float64"))
    x, loss_fn = floats(T, D), projected_loss()
    paddle.seed(9)
    factors = captured(model, loss_fn, [x])
    # Paddle's loop over its cells draws the same masks in the same order. (For the other kinds that loop fails.)
    model.recurrent.could_use_cudnn = False
    for i in range(B):
        paddle.seed(9)
        grads = paddle.grad([loss_fn(model, x)[i]], model.parameters())
        for (name, _), wanted in zip(model.named_parameters(), grads):
            np.testing.assert_allclose(factors[name].per_sample()[i].numpy(), wanted.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "direction": "bidirect"}])
def test_lstm_with_projection_runs_cell_by_cell(options, float64_states):
    model = randomise(built(lambda: Sequence(nn.LSTM(D, H, proj_size=3, **options)), "float64"))
    assert_parity(model, projected_loss(), [floats(T, D)])
    assert_parity(model, projected_loss(), [floats(T, D), paddle.to_tensor([5, 2, 3])])


class Cells(nn.Layer):
    """A loop of the user's over a cell."""

    def __init__(self, cell: nn.Layer, with_states: bool):
        super().__init__()
        self.embed, self.cell, self.with_states = nn.Linear(D, D), cell, with_states

    def forward(self, x):
        x = self.embed(x)
        states = None
        if self.with_states:
            h = paddle.tanh(x[:, 0].sum(axis=-1, keepdim=True)).expand([x.shape[0], H])
            states = (h, h * 0.5) if isinstance(self.cell, nn.LSTMCell) else h
        outputs = []
        for t in range(T):
            y, states = self.cell(x[:, t], states=states)
            outputs.append(y)
        return paddle.concat(outputs, axis=-1)


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("cell", ["SimpleRNNCell", "LSTMCell", "GRUCell"])
def test_cells(cell, with_states, float64_states):
    model = randomise(built(lambda: Cells(getattr(nn, cell)(D, H), with_states), "float64"))
    assert_parity(model, projected_loss(), [floats(T, D)])


@pytest.mark.parametrize("cell", ["SimpleRNNCell", "LSTMCell", "GRUCell"])
def test_cells_without_biases(cell, float64_states):
    options = {"bias_ih_attr": False, "bias_hh_attr": False}
    model = randomise(built(lambda: Cells(getattr(nn, cell)(D, H, **options), True), "float64"))
    assert len(assert_parity(model, projected_loss(), [floats(T, D)])) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_one_step(kind):
    model = randomise(built(lambda: Sequence(KINDS[kind](D, H)), "float64"))
    assert_parity(model, projected_loss(), [floats(1, D)])


@pytest.mark.parametrize(
    "wrap", [lambda: nn.RNN(nn.GRUCell(D, H)), lambda: nn.BiRNN(nn.LSTMCell(D, H), nn.LSTMCell(D, H))]
)
def test_wrapped_cells(wrap, float64_states):
    class Model(nn.Layer):
        def __init__(self):
            super().__init__()
            self.embed, self.recurrent = nn.Linear(D, D), wrap()

        def forward(self, x):
            return self.recurrent(self.embed(x))[0]

    assert_parity(randomise(built(Model, "float64")), projected_loss(), [floats(T, D)])


def test_the_layer_computes_what_paddle_computes():
    for kind in KINDS.values():
        model = randomise(built(lambda k=kind: Sequence(k(D, H, num_layers=2, direction="bidirect")), "float64"))
        x = floats(T, D)
        plain = model(x).numpy()
        seen = []

        def loss_fn(model, x, seen=seen):
            seen.append(model(x))
            return seen[-1].sum(axis=1)

        captured(model, loss_fn, [x])
        np.testing.assert_allclose(seen[0].numpy(), plain, rtol=1e-12)
        np.testing.assert_allclose(model(x).numpy(), plain, rtol=1e-12)


def test_partly_frozen():
    # Paddle itself cannot differentiate its kernel then.
    model, x = randomise(built(lambda: Sequence(nn.LSTM(D, H, num_layers=2)), "float64")), floats(T, D)
    whole = captured(model, projected_loss(), [x])
    model.recurrent.weight_ih_l0.stop_gradient = True
    model.recurrent.bias_hh_l1.stop_gradient = True
    part = captured(model, projected_loss(), [x])
    assert set(whole) - set(part) == {"recurrent.weight_ih_l0", "recurrent.bias_hh_l1"}
    for name, factor in part.items():
        np.testing.assert_array_equal(factor.per_sample().numpy(), whole[name].per_sample().numpy())


def test_as_many_samples_as_directions():
    """The states' first axis then has the length of the batch, and is not the batch."""
    model = randomise(built(lambda: Sequence(nn.GRU(D, H, direction="bidirect")), "float64"))
    assert_parity(model, projected_loss(), [floats(T, D)[:2]])
