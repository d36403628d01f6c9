"""What a training loop does besides forward, backward, step: each leaves the private gradient exact."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_privacy import DPSGD, DPAdamW, NoiseGenerator, PrivacyError, PrivacyWarning
from tests.oracle import clipped_sum, one_by_one


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    """Also: gradients are published as ``.grad`` before Paddle's own update, so that tests can compare them."""
    monkeypatch.setattr("paddle_privacy.optimizer.fused_update", lambda *args: False)
    paddle.seed(0)
    np.random.seed(0)


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def losses(model, *inputs):
    return (model(*inputs) ** 2).reshape([len(inputs[0]), -1]).sum(axis=1)


def build(model, clip_norm=0.5, **kwargs):
    kwargs.setdefault("noise_multiplier", 0.0)
    kwargs.setdefault("learning_rate", 0.0)
    return DPSGD(
        parameters=model if isinstance(model, list) else model.parameters(), clip_norm=clip_norm, batch_size=6,
        sampling="none", generator=NoiseGenerator.seeded(0), secure=False, **kwargs,
    )  # fmt: skip


def oracle(model, inputs, loss_fn=losses, clip_norm=0.5, parameters=None):
    return clipped_sum(one_by_one(model, loss_fn, inputs, parameters or model.parameters()), clip_norm)


def assert_step(optimizer, parameters, expected, divisor=6, atol=1e-6):
    optimizer.step()
    for parameter, total in zip(parameters, expected):
        np.testing.assert_allclose(parameter.grad.numpy(), total / divisor, rtol=1e-4, atol=atol)
    optimizer.clear_grad()


# Recompute


class Blocks(nn.Layer):
    def __init__(self, how, dropout=0.0):
        super().__init__()
        self.how = how
        self.embed = nn.Linear(3, 4)
        self.positions = nn.Embedding(5, 4)
        self.blocks = nn.LayerList(
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 4), nn.LayerNorm(4))
            for _ in range(3)
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x) + self.positions(paddle.arange(x.shape[1]).unsqueeze(0))
        for block in self.blocks:
            x = x + (block(x) if self.how is None else recompute(block, x, use_reentrant=self.how))
        return self.head(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("shared", [False, True])
def test_recompute_is_exact(reentrant, shared):
    model = Blocks(reentrant)
    if shared:
        model.blocks[2] = model.blocks[0]
    x = paddle.randn([6, 5, 3])
    model.how = None
    expected = oracle(model, [x], clip_norm=5.0)
    model.how = reentrant
    optimizer = build(model, clip_norm=5.0)
    for _ in range(2):
        losses(model, x).mean().backward()
        assert_step(optimizer, model.parameters(), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_with_dropout_and_accumulation(reentrant):
    """The same masks in the recomputed forward; the groups of two backward passes do not run into each other."""
    gradients = []
    x = paddle.randn([6, 5, 3])
    for how in (None, reentrant):
        paddle.seed(7)
        model = Blocks(how, dropout=0.4)
        optimizer = build(model)
        paddle.seed(8)
        for rows in (x[:4], x[4:]):
            losses(model, rows).mean().backward()
        optimizer.step()
        assert optimizer.last_norms.shape == [6]
        gradients.append([p.grad.numpy() for p in model.parameters()])
    for plain, recomputed in zip(*gradients):
        np.testing.assert_allclose(plain, recomputed, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_of_position_ids_that_broadcast(reentrant):
    class Positions(nn.Layer):
        def __init__(self):
            super().__init__()
            self.words, self.positions = nn.Linear(3, 4), nn.Embedding(5, 4)

        def forward(self, x):
            return self.words(x) + self.positions(paddle.arange(x.shape[1]).unsqueeze(0))

    class Model(nn.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.how = nn.Linear(3, 3), Positions(), None

        def forward(self, x):
            x = self.first(x)
            return self.block(x) if self.how is None else recompute(self.block, x, use_reentrant=self.how)

    model = Model()
    x = paddle.randn([6, 5, 3])
    expected = oracle(model, [x])
    model.how = reentrant
    losses_before = build(model)
    losses(model, x).mean().backward()
    assert_step(losses_before, model.parameters(), expected)


# Forwards that are not trained on


@pytest.mark.parametrize("mode", ["no_grad", "eval", "both", "train mode with gradients"])
@pytest.mark.parametrize("when", ["before backward", "after backward", "after step"])
def test_other_forwards_change_nothing(mode, when):
    model = network()
    x = paddle.randn([6, 3])
    expected = oracle(model, [x])
    optimizer = build(model)

    def other(now):
        if now != when:
            return
        if mode in ("eval", "both"):
            model.eval()
        if mode == "train mode with gradients" or mode == "eval":
            model(paddle.randn([5, 3]))
        else:
            with paddle.no_grad():
                model(paddle.randn([5, 3]))
        model.train()

    for _ in range(2):
        loss = losses(model, x).mean()
        other("before backward")
        loss.backward()
        other("after backward")
        assert_step(optimizer, model.parameters(), expected)
        other("after step")


# Several forwards, one backward


def test_two_forwards_of_one_batch_are_one_sample_each():
    """R-Drop and consistency losses: both passes of row i are the gradient of sample i."""
    model = network()
    x = paddle.randn([6, 3])

    def both(model, x):
        a, b = model(x), model(x * 1.1)
        return ((a - b) ** 2).sum(1) * 100 + (a**2).sum(1)

    expected = oracle(model, [x], both)
    optimizer = build(model)
    both(model, x).mean().backward()
    assert_step(optimizer, model.parameters(), expected)


def test_siamese_branches_are_one_sample_each():
    model = network()
    left, right = paddle.randn([6, 3]), paddle.randn([6, 3])

    def distance(model, left, right):
        return ((model(left) - model(right)) ** 2).sum(1)

    expected = oracle(model, [left, right], distance)
    optimizer = build(model)
    distance(model, left, right).mean().backward()
    assert_step(optimizer, model.parameters(), expected)


def test_two_losses_one_backward_each_over_two_models_of_one_optimizer():
    encoder, heads = nn.Linear(3, 4), [nn.Linear(4, 2), nn.Linear(4, 1)]
    parameters = [p for layer in (encoder, *heads) for p in layer.parameters()]
    x = paddle.randn([6, 3])

    def loss(_, x):
        z = paddle.tanh(encoder(x))
        return (heads[0](z) ** 2).sum(1) + heads[1](z).abs().sum(1)

    expected = oracle(encoder, [x], loss, parameters=parameters)
    optimizer = build(parameters)
    loss(None, x).mean().backward()
    assert_step(optimizer, parameters, expected)


# Layers that run sometimes or never


def test_conditional_layers():
    class Conditional(nn.Layer):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x, deep):
            x = paddle.tanh(self.one(x))
            return self.head(paddle.tanh(self.two(x)) if deep else x)

    model = Conditional()
    x = paddle.randn([6, 3])
    expected = {deep: oracle(model, [x, deep], lambda m, x, deep: (m(x, deep) ** 2).sum(1)) for deep in (True, False)}
    assert not np.abs(expected[False][2]).any() and np.abs(expected[True][2]).any()
    optimizer = build(model)
    for deep in (False, True, False):
        (model(x, deep) ** 2).sum(1).mean().backward()
        assert_step(optimizer, model.parameters(), expected[deep])


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_unused_parameters_get_noise_and_nothing_else(clipping):
    class Unused(nn.Layer):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 1), nn.Linear(50, 40)

        def forward(self, x):
            return self.used(x)

    model = Unused()
    optimizer = build(model, clip_norm=2.0, noise_multiplier=3.0, learning_rate=0.1, clipping=clipping)
    before = model.unused.weight.numpy()
    losses(model, paddle.randn([6, 3])).mean().backward()
    optimizer.step()
    noise = model.unused.weight.grad.numpy() * 6
    assert (model.unused.weight.numpy() != before).all()
    # 2000 draws of N(0, 6²): the sample's standard deviation is within 10% but for one run in 10^9.
    assert abs(noise.std() / 6.0 - 1) < 0.1


def test_a_batch_whose_layers_are_all_skipped_is_a_noise_step():
    model = network()
    optimizer = build(model, noise_multiplier=1.0)
    x = paddle.randn([6, 3])
    (losses(model, x) * 0.0).mean().backward()
    optimizer.step()
    assert float(optimizer.last_norms.max()) == 0.0
    assert len(optimizer.accountant.history) == 1


# Writing in place, keyword inputs


def test_in_place_activations_are_exact():
    def run(private):
        paddle.seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = build(model, clip_norm=1e6) if private else None
        h = F.relu_(model[0](paddle.linspace(-1, 1, 18).reshape([6, 3])))
        h = model[1](h)
        h = F.tanh_(h)
        y = model[2](h)
        y.add_(paddle.ones([6, 2]))
        (y**2).sum(1).mean().backward()
        if private:
            optimizer.step()
        return [p.grad.numpy() for p in model.parameters()]

    for plain, private in zip(run(False), run(True)):
        np.testing.assert_allclose(plain, private, rtol=1e-4, atol=1e-6)


def test_keyword_inputs():
    class Keywords(nn.Layer):
        def __init__(self):
            super().__init__()
            self.words, self.bilinear = nn.Embedding(7, 3), nn.Bilinear(3, 3, 2)

        def forward(self, *, ids, scale=1.0):
            x = self.words(x=ids)
            return self.bilinear(x2=x.sum(1), x1=scale * x.mean(1))

    model = Keywords()
    ids = paddle.to_tensor(np.arange(18).reshape(6, 3) % 7)

    def loss(model, ids):
        return (model(ids=ids, scale=2.0) ** 2).sum(1)

    expected = oracle(model, [ids], loss)
    optimizer = build(model)
    loss(model, ids).mean().backward()
    assert_step(optimizer, model.parameters(), expected)


# The model as an object


def test_state_dict_and_copies_of_a_tapped_model():
    model, plain = network(), network()
    names = list(plain.state_dict())
    optimizer = build(model)
    x = paddle.randn([6, 3])
    losses(model, x).mean().backward()
    assert list(model.state_dict()) == names
    plain.set_state_dict(model.state_dict())
    duplicate = copy.deepcopy(model)
    restored = pickle.loads(pickle.dumps(model.state_dict()))
    for copied in (duplicate, plain):
        for a, b in zip(copied.parameters(), model.parameters()):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        copied.clear_gradients()
        losses(copied, x).mean().backward()
        # A copy belongs to no optimizer: plain gradients.
        assert all(p.grad is not None and not p.stop_gradient for p in copied.parameters())
    assert set(restored) == set(names)
    optimizer.step()
    assert optimizer.last_norms.shape == [6]
    own = build(duplicate)
    duplicate.clear_gradients()
    losses(duplicate, x).mean().backward()
    own.step()


def test_pickled_layer_carries_no_taps():
    layer = nn.LayerNorm(4)
    build(layer)
    hooks = pickle.loads(pickle.dumps(list(layer._forward_pre_hooks.values())))
    assert [hook(layer, (), {}) for hook in hooks] == [None] * len(hooks)


def test_load_state_dict_between_steps():
    model, other = network(), network()
    optimizer = build(model)
    x = paddle.randn([6, 3])
    expected = oracle(other, [x])
    losses(model, x).mean().backward()
    optimizer.step()
    model.set_state_dict(other.state_dict())
    losses(model, x).mean().backward()
    assert_step(optimizer, model.parameters(), expected)


def test_freezing_and_unfreezing_between_epochs():
    model = network()
    x = paddle.randn([6, 3])
    first, last = list(model[0].parameters()), list(model[2].parameters())
    everything = oracle(model, [x])
    only_last = oracle(model, [x], parameters=last)
    optimizer = build(model)

    def epoch(trained, expected):
        losses(model, x).mean().backward()
        assert_step(optimizer, trained, expected)

    epoch(model.parameters(), everything)
    for p in first:
        p.stop_gradient = True
    epoch(last, only_last)
    losses(model, x).mean().backward()
    optimizer.step()
    assert all(p.grad is None for p in first)
    for p in first:
        p.stop_gradient = False
    epoch(model.parameters(), everything)


def test_layers_frozen_at_first_are_tapped_when_they_thaw():
    model = network()
    x = paddle.randn([6, 3])
    expected = oracle(model, [x])
    for p in model[0].parameters():
        p.stop_gradient = True
    optimizer = build(model)
    losses(model, x).mean().backward()
    optimizer.step()
    for p in model[0].parameters():
        p.stop_gradient = False
    losses(model, x).mean().backward()
    assert_step(optimizer, model.parameters(), expected)


# Interruptions


@pytest.mark.parametrize("where", ["forward of a layer", "between layers", "hook of the user", "backward"])
def test_keyboard_interrupt_leaves_nothing_behind(where):
    class Interrupting(nn.Layer):
        armed = True

        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            x = self.inner(x)
            if self.armed and where == "between layers":
                raise KeyboardInterrupt
            if self.armed and where == "backward":
                x.register_hook(self.interrupt)
            return self.head(x)

        def interrupt(self, gradient):
            raise KeyboardInterrupt

    model = Interrupting()
    x = paddle.randn([6, 3])
    model.armed = False
    expected = oracle(model, [x])
    model.armed = True
    handle = None
    optimizer = build(model)
    if where == "forward of a layer":
        original = F.linear
        F.linear = lambda *args, **kwargs: model.interrupt(None)
    if where == "hook of the user":
        handle = model.inner.register_forward_post_hook(lambda layer, i, o: model.interrupt(None), prepend=True)
    with pytest.raises((KeyboardInterrupt, OSError, SystemError)):
        try:
            losses(model, x).mean().backward()
        finally:
            if where == "forward of a layer":
                F.linear = original
    if handle is not None:
        handle.remove()
    model.armed = False
    if where == "backward":
        with pytest.raises(PrivacyError, match="^a backward\\(\\) did not finish, so its samples cannot be used"):
            optimizer.step()
    for _ in range(2):
        losses(model, x).mean().backward()
        assert_step(optimizer, model.parameters(), expected)
    assert not any(p.stop_gradient for p in model.parameters())


def test_error_in_the_forward_leaves_nothing_behind():
    model = network()
    optimizer = build(model)
    with pytest.raises(ValueError):
        model(paddle.randn([6, 4]))
    x = paddle.randn([6, 3])
    assert not any(p.stop_gradient for p in model.parameters())
    losses(model, x).mean().backward()
    optimizer.step()
    assert optimizer.last_norms.shape == [6]


# Optimizers together


def test_alternating_optimizers_must_clear_what_the_other_ones_loss_left():
    """As in adversarial training: without clear_grad, a row would count twice for the second optimizer."""
    one, two = nn.Linear(3, 3), nn.Linear(3, 1)
    first = build(list(one.parameters()))
    second = build(list(two.parameters()))
    x = paddle.randn([6, 3])
    (two(one(x)) ** 2).mean().backward()
    first.step()
    first.clear_grad()
    second.clear_grad()
    two(one(x)).abs().mean().backward()
    second.step()
    assert second.last_norms.shape == [6]


def test_dp_adamw_over_parameter_groups():
    model = network()
    groups = [
        {"params": list(model[0].parameters()), "learning_rate": 0.1},
        {"params": list(model[2].parameters()), "weight_decay": 0.0},
    ]
    optimizer = DPAdamW(
        parameters=groups, learning_rate=0.1, clip_norm=0.5, noise_multiplier=0.0, batch_size=6, sampling="none"
    )
    x = paddle.randn([6, 3])
    losses(model, x).mean().backward()
    optimizer.step()
    assert optimizer.last_norms.shape == [6]


def test_modes_are_silent():
    """Nothing in an ordinary loop warns, but for what the first test of each mode asserts."""
    model = network()
    optimizer = build(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        for _ in range(2):
            losses(model, paddle.randn([6, 3])).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            model.eval()
            with paddle.no_grad():
                model(paddle.randn([3, 3]))
            model.train()
