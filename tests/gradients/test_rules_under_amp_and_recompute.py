"""Recurrent layers, bare parameters and tied heads under mixed precision and under recompute."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_privacy import PrivacyError
from tests.gradients.parity import assert_parity, captured, randomise, tensor
from tests.gradients.test_bare_parameters import TIED, TiedModel, TinyViT

B = 3


def floats(*shape: int):
    return tensor(np.random.default_rng(1).standard_normal([B, *shape]), "float32")


def loss_of(autocast: bool):
    def loss_fn(model, x):
        with paddle.amp.auto_cast(enable=autocast, dtype="bfloat16", level="O1"):
            out = model(x)
        out = out.astype("float32")
        weights = tensor(np.random.default_rng(5).standard_normal([1, *out.shape[1:]]), "float32")
        return (paddle.tanh(out) * weights).reshape([out.shape[0], -1]).sum(axis=1)

    return loss_fn


class Recurrent(nn.Layer):
    def __init__(self, layer):
        super().__init__()
        self.first, self.recurrent, self.head = nn.Linear(4, 4), layer, nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.recurrent(self.first(x))[0]).mean(axis=1)


AUTOCAST = {
    "lstm": (lambda: Recurrent(nn.LSTM(4, 6)), lambda: floats(5, 4)),
    "gru": (lambda: Recurrent(nn.GRU(4, 6)), lambda: floats(5, 4)),
    "rnn": (lambda: Recurrent(nn.SimpleRNN(4, 6)), lambda: floats(5, 4)),
    "vit": (lambda: TinyViT(0.0), lambda: floats(3, 8, 8)),
    "tied": (
        lambda: TiedModel(TIED["T"]),
        lambda: paddle.to_tensor(np.random.default_rng(0).integers(0, 7, [B, 6])),
    ),
    "conv-transpose": (lambda: nn.Conv2DTranspose(4, 6, 3), lambda: floats(4, 4, 3)),
    "prelu": (lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(4)), lambda: floats(4)),
    "instance-norm": (lambda: nn.Sequential(nn.Conv2D(4, 4, 1), nn.InstanceNorm2D(4)), lambda: floats(4, 3, 3)),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_bfloat16_autocast(name):
    build, inputs = AUTOCAST[name]
    # The bfloat16 kernels round the batch and the single sample differently: 2^-8 a value.
    assert_parity(randomise(build()), loss_of(True), [inputs()], dtype="float32", rtol=3e-2)


class Block(nn.Layer):
    """An LSTM and parameters captured in each of the three ways: expanded, by products, replayed."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6)
        self.scale, self.product = self.create_parameter([6]), self.create_parameter([6, 6])
        self.positions = self.create_parameter([7, 6])

    def forward(self, x):
        return (self.lstm(x)[0] * self.scale) @ self.product + self.positions[: x.shape[1]]


class Recomputed(nn.Layer):
    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 4), Block(), nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        if self.reentrant is None:
            return self.head(self.block(x))
        return self.head(recompute(self.block, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(reentrant):
    model, plain = randomise(Recomputed(reentrant)), Recomputed(None)
    plain.set_state_dict(model.state_dict())
    for _ in range(2):
        factors = assert_parity(model, loss_of(False), [floats(5, 4)], dtype="float32", oracle_model=plain)
        assert len(factors) == len(model.parameters())


class RandomBlock(nn.Layer):
    """Differentiated row by row: a sliced table cannot be expanded, and dropout cannot be replayed."""

    def __init__(self):
        super().__init__()
        self.positions, self.last = self.create_parameter([7, 4]), nn.Linear(4, 6)

    def forward(self, x):
        return self.last(F.dropout(x + self.positions[: x.shape[1]], 0.4, training=self.training))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_of_a_random_block(reentrant):
    model, plain = Recomputed(reentrant), Recomputed(None)
    model.block, plain.block = RandomBlock(), RandomBlock()
    plain.set_state_dict(randomise(model).state_dict())
    x, loss_fn = floats(5, 4), loss_of(False)
    paddle.seed(7)
    factors = captured(model, loss_fn, [x])
    for i in range(B):
        paddle.seed(7)
        grads = paddle.grad([loss_fn(plain, x)[i]], plain.parameters())
        for (name, _), wanted in zip(plain.named_parameters(), grads):
            assert float(wanted.abs().max()) > 0
            np.testing.assert_allclose(factors[name].per_sample()[i].numpy(), wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_an_input_that_is_modified_in_place_after_the_layer_read_it_is_refused():
    class Spoilt(nn.Layer):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 6, time_major=True)

        def forward(self, x):
            x = x.transpose([1, 0, 2])
            out = self.lstm(x)[0]
            x.scale_(2.0)
            return out.transpose([1, 0, 2])

    with pytest.raises(PrivacyError, match="the input of layer 'lstm' was modified in place"):
        captured(Spoilt(), loss_of(False), [floats(5, 4)])
