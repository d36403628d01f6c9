"""per_sample_gradients and check_grad_rule: what users call outside of training."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

import paddle_privacy
from paddle_privacy import DPSGD, PrivacyError, check_grad_rule, per_sample_gradients, register_grad_rule
from paddle_privacy.gradients.rules import registry
from tests.gradients.parity import built, randomise, tensor
from tests.oracle import one_by_one

B = 4


def classifier(dtype: str = "float64") -> nn.Layer:
    return randomise(built(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), dtype))


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none").squeeze(-1)


def batch(dtype: str = "float64"):
    rng = np.random.default_rng(0)
    return tensor(rng.standard_normal([B, 5]), dtype), paddle.to_tensor(rng.integers(0, 3, [B, 1]))


@pytest.mark.parametrize("mode", ["auto", "microbatch"])
def test_equals_one_by_one_autograd(mode):
    model, (x, y) = classifier(), batch()
    found = per_sample_gradients(model, cross_entropy, x, y, mode=mode)
    names = [name for name, _ in model.named_parameters()]
    assert list(found) == names
    for name, wanted in zip(names, one_by_one(model, cross_entropy, [x, y], model.parameters())):
        assert found[name].shape == list(wanted.shape)
        np.testing.assert_allclose(found[name].numpy(), wanted, rtol=1e-9, atol=1e-12)


def test_leaves_the_model_and_its_optimizer_alone():
    model, (x, y) = classifier(), batch()
    optimizer = DPSGD(parameters=model, learning_rate=0.1, clip_norm=1.0, noise_multiplier=0.0, batch_size=B)
    cross_entropy(model, x, y).mean().backward()
    optimizer.step()
    published = [p.grad.numpy() for p in model.parameters()]
    found = per_sample_gradients(model, cross_entropy, x, y)
    for p, before in zip(model.parameters(), published):
        np.testing.assert_array_equal(p.grad.numpy(), before)
    x2, y2 = batch()
    cross_entropy(model, x2, y2).mean().backward()
    optimizer.step()
    norms = np.sqrt(sum((g.numpy().reshape(B, -1) ** 2).sum(axis=1) for g in found.values()))
    np.testing.assert_allclose(optimizer.last_norms.numpy(), norms, rtol=1e-9)


def test_frozen_unused_and_tied_parameters():
    class Model(nn.Layer):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(6, 5)
            self.unused = nn.Linear(5, 5)
            self.frozen = nn.Linear(5, 5)
            for p in self.frozen.parameters():
                p.stop_gradient = True

        def forward(self, ids):
            return paddle.matmul(self.frozen(self.embed(ids)), self.embed.weight, transpose_y=True)

    model = randomise(built(Model, "float64"))
    ids = paddle.to_tensor(np.random.default_rng(0).integers(0, 6, [B, 3]))
    loss_fn = lambda m, ids: paddle.tanh(m(ids)).sum(axis=[1, 2])  # noqa: E731
    found = per_sample_gradients(model, loss_fn, ids)
    assert set(found) == {"embed.weight", "unused.weight", "unused.bias"}
    assert not found["unused.weight"].abs().sum() and found["unused.weight"].shape == [B, 5, 5]
    (wanted,) = one_by_one(model, loss_fn, [ids], [model.embed.weight])
    np.testing.assert_allclose(found["embed.weight"].numpy(), wanted, rtol=1e-9, atol=1e-12)


def test_nested_inputs_in_microbatches():
    model, (x, y) = classifier(), batch()
    nested = lambda m, b: cross_entropy(m, b["x"], b["y"][0])  # noqa: E731
    found = per_sample_gradients(model, nested, {"x": x, "y": [y]}, mode="microbatch")
    wanted = per_sample_gradients(model, cross_entropy, x, y)
    for name in wanted:
        np.testing.assert_allclose(found[name].numpy(), wanted[name].numpy(), rtol=1e-9, atol=1e-12)


def test_vmap_is_used_where_paddle_has_it(monkeypatch):
    model, (x, y) = classifier(), batch()
    if not hasattr(paddle, "vmap"):
        with pytest.raises(ValueError, match="mode='vmap' needs paddle.vmap, which Paddle .* does not have"):
            per_sample_gradients(model, cross_entropy, x, y, mode="vmap")

    def looped(function):
        def mapped(*columns):
            made = [function(*(c[i] for c in columns)) for i in range(columns[0].shape[0])]
            return tuple(paddle.stack(parts) for parts in zip(*made))

        return mapped

    monkeypatch.setattr(paddle, "vmap", looped, raising=False)
    found = per_sample_gradients(model, cross_entropy, x, y, mode="vmap")
    wanted = per_sample_gradients(model, cross_entropy, x, y)
    for name in wanted:
        np.testing.assert_allclose(found[name].numpy(), wanted[name].numpy(), rtol=1e-9, atol=1e-12)


def test_refused_arguments():
    model, (x, y) = classifier(), batch()
    with pytest.raises(ValueError, match="mode must be one of"):
        per_sample_gradients(model, cross_entropy, x, y, mode="ghost")
    with pytest.raises(ValueError, match=r"shape \[B\], found a tensor of shape \[\]"):
        per_sample_gradients(model, lambda m, x, y: cross_entropy(m, x, y).mean(), x, y)
    with pytest.raises(ValueError, match="inputs must hold a tensor"):
        per_sample_gradients(model, lambda m: m(x).sum(axis=1), mode="microbatch")


class Affine(nn.Layer):
    """y = γ x + β over the last axis: the example of docs/custom_layers.md."""

    def __init__(self, features: int):
        super().__init__()
        self.gamma = self.create_parameter([features])
        self.beta = self.create_parameter([features], is_bias=True)

    def forward(self, x):
        return self.gamma * x + self.beta


@pytest.fixture
def affine_rule():
    yield
    registry._by_type.pop(Affine, None)


def positions(*shape):
    return tensor(np.random.default_rng(3).standard_normal([B, *shape]), "float64")


def test_a_right_rule_passes(affine_rule):
    @register_grad_rule(Affine)
    def affine(layer, inputs, output_grad):
        over = list(range(1, output_grad.ndim - 1))
        return {"gamma": (inputs[0] * output_grad).sum(axis=over), "beta": output_grad.sum(axis=over)}

    result = check_grad_rule(randomise(built(lambda: Affine(5), "float64")), positions(3, 5))
    assert result.ok and result.error <= 1e-12 and "agrees with" in str(result)


def test_a_wrong_rule_is_reported_with_its_worst_element(affine_rule):
    @register_grad_rule(Affine)
    def affine(layer, inputs, output_grad):
        wrong = (inputs[0] * output_grad).sum(axis=1)
        wrong[2, 3] += 7.0
        return {"gamma": wrong, "beta": output_grad.sum(axis=1)}

    layer, x = randomise(built(lambda: Affine(5), "float64")), positions(3, 5)
    result = check_grad_rule(layer, x, raise_on_error=False)
    assert not result.ok
    assert (result.parameter, result.sample, result.element) == ("gamma", 2, (3,))
    assert result.found == pytest.approx(result.expected + 7.0)
    with pytest.raises(PrivacyError, match=r"layer Affine: the rule differs from .* worst at gamma\[3\] of sample 2"):
        check_grad_rule(layer, x)


def test_a_rule_that_forgets_the_padding_or_a_parameter_is_caught(affine_rule):
    @register_grad_rule(Affine)
    def affine(layer, inputs, output_grad):
        return {"gamma": (inputs[0] * output_grad).sum(axis=1)}

    with pytest.raises(PrivacyError, match="trains parameter 'beta', which its gradient rule does not know"):
        check_grad_rule(randomise(built(lambda: Affine(5), "float64")), positions(3, 5))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_layers_without_a_rule_of_the_users_pass_too(dtype):
    layer = randomise(built(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), dtype))
    assert check_grad_rule(layer, tensor(np.random.default_rng(3).standard_normal([B, 3, 8]), dtype)).ok
    recurrent = randomise(built(lambda: nn.LSTM(5, 4), dtype))
    assert check_grad_rule(recurrent, tensor(np.random.default_rng(3).standard_normal([B, 6, 5]), dtype)).ok


def test_checks_that_could_show_nothing_are_refused():
    layer = built(lambda: Affine(5), "float64")
    with pytest.raises(ValueError, match="at least two samples"):
        check_grad_rule(layer, positions(5)[:1])
    for p in layer.parameters():
        p.stop_gradient = True
    with pytest.raises(ValueError, match="no trainable parameter"):
        check_grad_rule(layer, positions(5))


def test_they_are_public():
    assert {"per_sample_gradients", "check_grad_rule", "register_grad_rule"} <= set(paddle_privacy.__all__)
