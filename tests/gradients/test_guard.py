"""Every way in which a sample could count more than its bound, or reach another sample's gradient: each is refused."""

from __future__ import annotations

import gc
import re
import threading
import warnings

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_privacy import DPSGD, PrivacyError, PrivacyWarning, UnsupportedLayer
from tests.oracle import one_by_one


def optimizer(model, batch_size=4, **kwargs):
    kwargs.setdefault("clip_norm", 1e6)
    return DPSGD(
        parameters=model.parameters() if isinstance(model, nn.Layer) else model,
        learning_rate=0.1,
        noise_multiplier=0.0,
        batch_size=batch_size,
        sampling="none",
        **kwargs,
    )


def step(model, opt, *inputs):
    (model(*inputs) ** 2).mean().backward()
    opt.step()


def exactly(message):
    return "^" + re.escape(message) + "$"


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    """Also: gradients are published as ``.grad`` before Paddle's own update, so that tests can compare them."""
    monkeypatch.setattr("paddle_privacy.optimizer.fused_update", lambda *args: False)
    paddle.seed(0)
    gc.collect()


# The structure probe


class TimeMajor(nn.Layer):
    """[B, T, d] turned into [T, B, d] before the tapped layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.inner(x.transpose([1, 0, 2])).transpose([1, 0, 2]).sum(axis=1))


class UnbatchedPositions(nn.Layer):
    """Position ids of shape [T]: the embedding's output [T, d] is broadcast over the batch."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 3), nn.Embedding(7, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, ids):
        return self.head((self.words(ids) + self.positions(paddle.arange(ids.shape[1]))).sum(axis=1))


class Centred(nn.Layer):
    """The mean of the batch is taken off, in plain tensor code."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        x = self.first(x)
        return self.last(x - x.mean(axis=0, keepdim=True))


class MyBatchNorm(nn.Layer):
    def forward(self, x):
        return (x - x.mean(axis=0)) / x.std(axis=0)


class Similarities(nn.Layer):
    """A contrastive model: its output is [B, B]."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 3)

    def forward(self, x):
        z = self.encoder(x)
        return z @ z.T


class Rolled(nn.Layer):
    """Mixes samples only through the order of the rows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + 1e-3 * x.roll(1, axis=0))


class RunningMean(nn.Layer):
    """Keeps an exponential average of what it sees in a buffer, as batch norm does; nothing is mixed."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("average", paddle.zeros([3]))
        self.register_buffer("steps", paddle.zeros([1]))

    def forward(self, x):
        self.average.set_value(0.9 * self.average + 0.1 * x.detach().mean(axis=0))
        self.steps.set_value(self.steps + 1)
        return self.inner(x)


@pytest.mark.parametrize("rows", [2, 3, 4, 8])
def test_time_major_activation_of_the_batchs_length_is_refused(rows):
    model = TimeMajor()
    optimizer(model)
    with pytest.raises(UnsupportedLayer, match="layer 'inner' \\(Linear\\) depends on other rows"):
        model(paddle.randn([rows, rows, 3]))


def test_time_major_activation_of_another_length_is_refused():
    model = TimeMajor()
    optimizer(model)
    with pytest.raises(
        UnsupportedLayer,
        match=exactly(
            "layer 'inner' (Linear) sees 5 rows on its first axis where 'TimeMajor' was called with 4; the first axis "
            "of every activation must be the batch, so keep positions on axes of their own ([B, T, d] instead of "
            "[B*T, d]) and give position ids as [B, T]"
        ),
    ):
        model(paddle.randn([4, 5, 3]))


@pytest.mark.parametrize("length", [4, 5])
def test_position_ids_without_a_batch_axis_are_exact_or_refused(length):
    """As many positions as samples is the trap: the ids then look like one id a sample."""
    model = UnbatchedPositions()
    ids = paddle.to_tensor(np.arange(4 * length).reshape([4, length]) % 11)
    per_sample = one_by_one(model, lambda m, x: (m(x) ** 2).sum(1), [ids], model.parameters())
    norms = np.sqrt(sum((g.reshape(4, -1) ** 2).sum(1) for g in per_sample))
    opt = optimizer(model)
    try:
        for _ in range(2):
            (model(ids) ** 2).sum(1).mean().backward()
            opt._capture.finish()
            np.testing.assert_allclose(opt._clipped_sum.norms.numpy(), norms, rtol=1e-5)
            opt.clear_grad()
    except UnsupportedLayer as refused:
        assert re.search("layer 'positions' \\(Embedding\\)", str(refused))


class PrefixBank(nn.Layer):
    """[4, d] learned vectors through a layer: four rows that are no samples."""

    def __init__(self):
        super().__init__()
        self.bank, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(x * self.bank(paddle.ones([4, 3])).sum(axis=0))


@pytest.mark.parametrize("rows, message", [
    (4, "layer 'bank' (Linear) sees 4 rows on its first axis when 'PrefixBank' gets 5 samples, so that axis is not "
        "the batch (it had the batch's length, 4, by chance); make activations batch first and give position ids as "
        "[B, T]"),
    (6, "layer 'bank' (Linear) sees 4 rows on its first axis where 'PrefixBank' was called with 6; the first axis of "
        "every activation must be the batch, so keep positions on axes of their own ([B, T, d] instead of [B*T, d]) "
        "and give position ids as [B, T]"),
])  # fmt: skip
def test_rows_that_are_no_samples_are_refused(rows, message):
    model = PrefixBank()
    optimizer(model)
    with pytest.raises(UnsupportedLayer, match=exactly(message)):
        model(paddle.randn([rows, 3]))


def test_flattened_positions_are_refused():
    class Flat(nn.Layer):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x):
            return self.inner(x.reshape([-1, 3])).reshape([x.shape[0], -1])

    model = Flat()
    optimizer(model)
    with pytest.raises(UnsupportedLayer, match="layer 'inner' \\(Linear\\) sees 20 rows on its first axis"):
        model(paddle.randn([4, 5, 3]))


@pytest.mark.parametrize("model, place", [
    (Centred, "an activation at layer 'last' (Linear) depends on other rows: 'Centred' mixes"),
    (Rolled, "an activation at layer 'last' (Linear) depends on other rows: 'Rolled' mixes"),
    (Similarities, "layer 'Similarities' (Similarities) mixes"),
    (lambda: nn.Sequential(nn.Linear(3, 3), MyBatchNorm(), nn.Linear(3, 1)), "layer '1' (MyBatchNorm) mixes"),
    (lambda: nn.Sequential(MyBatchNorm(), nn.Linear(3, 1)), "layer '0' (MyBatchNorm) mixes"),
])  # fmt: skip
def test_mixing_in_the_forward_is_refused_and_named(model, place):
    model = model()
    optimizer(model)
    name = type(model).__name__
    with pytest.raises(
        UnsupportedLayer,
        match=exactly(
            f"{place} the samples of a batch (replacing some rows of the input moved others in '{name}'), so one "
            "sample's data would reach another sample's gradient; use a layer that works within one sample, batch "
            "first, such as GroupNorm or LayerNorm"
        ),
    ):
        model(paddle.randn([4, 3]))


def test_branch_on_the_batch_is_refused():
    class Branch(nn.Layer):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x):
            return self.one(x) if bool(x[0, 0] > 0) else self.two(x)

    model = Branch()
    optimizer(model)
    x = paddle.to_tensor([[1.0, 0, 0], [-1.0, 0, 0], [-1.0, 1, 0]])
    with pytest.raises(UnsupportedLayer, match="^which layers run depends on other rows: 'Branch' mixes"):
        model(x)


@pytest.mark.parametrize("norm", [
    lambda: nn.BatchNorm1D(3),
    lambda: nn.BatchNorm1D(3, weight_attr=False, bias_attr=False),
    lambda: nn.BatchNorm(3),
    lambda: nn.SyncBatchNorm(3),
    lambda: nn.BatchNorm1D(3, use_global_stats=False),
])  # fmt: skip
@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_in_training_mode_is_refused(norm, frozen):
    model = nn.Sequential(nn.Linear(3, 3), norm(), nn.Linear(3, 1))
    for parameter in [p for p in (model[1].weight, model[1].bias) if p is not None]:
        parameter.stop_gradient = frozen
    optimizer(model)
    with pytest.raises(UnsupportedLayer, match="layer '1' \\((Sync)?BatchNorm(1D)?\\) in training mode mixes"):
        model(paddle.randn([4, 3]))
    model[1].eval()
    if model[1]._use_global_stats is False and not isinstance(model[1], nn.BatchNorm):
        with pytest.raises(
            UnsupportedLayer, match="'1' \\(BatchNorm1D\\) in eval mode with use_global_stats=False mixes"
        ):
            model(paddle.randn([4, 3]))
    elif not isinstance(model[1], nn.SyncBatchNorm):
        model(paddle.randn([4, 3]))


def test_statistics_kept_in_a_buffer_are_refused_and_counters_are_not():
    model = RunningMean()
    optimizer(model)
    with pytest.raises(
        UnsupportedLayer,
        match=exactly(
            "layer 'RunningMean' (RunningMean) stores statistics of the batch in its buffer 'average', which is saved "
            "with the model and has no noise; freeze the buffer or put the layer in eval() mode"
        ),
    ):
        model(paddle.randn([4, 3]))
    model.eval()


def test_probe_leaves_buffers_random_states_and_taps_alone():
    class Counting(nn.Layer):
        def __init__(self):
            super().__init__()
            self.inner, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
            self.register_buffer("steps", paddle.zeros([1]))

        def forward(self, x):
            self.steps.set_value(self.steps + 1)
            return self.drop(self.inner(x)) + np.random.rand() * self.steps

    def run(private):
        paddle.seed(3)
        np.random.seed(3)
        model = Counting()
        opt = optimizer(model) if private else None
        start = [p.clone() for p in model.parameters()]
        x = paddle.arange(12, dtype="float32").reshape([4, 3])
        for _ in range(2):
            (model(x) ** 2).sum(1).mean().backward()
            if opt is not None:
                opt.step()
            gradient = model.inner.weight.grad.clone()
            model.clear_gradients() if opt is None else opt.clear_grad()
            for parameter, value in zip(model.parameters(), start):
                parameter.set_value(value)
        return model.steps.item(), paddle.rand([2]).numpy(), np.random.rand(), gradient.numpy()

    for plain, private in zip(run(False), run(True)):
        np.testing.assert_allclose(plain, private, rtol=1e-5)


def test_probe_runs_once_a_structure():
    calls = []

    class Counted(nn.Layer):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, deep=False):
            calls.append(len(x))
            x = self.one(x)
            return self.two(x) if deep else x

    model = Counted()
    opt = optimizer(model)

    def forwards(deep=False, rows=4):
        calls.clear()
        (model(paddle.randn([rows, 3]), deep=deep) ** 2).sum(1).mean().backward()
        opt.step()
        opt.clear_grad()
        return list(calls)

    assert forwards() == [4, 4, 4, 5]
    assert forwards() == [4]
    # Another path: one more replay, since this forward was not watched from its start.
    assert forwards(deep=True) == [4, 4, 4, 4, 5]
    assert forwards(deep=True) == forwards() == [4]
    assert forwards(rows=6) == [6]


def test_probe_waits_for_rows_that_differ():
    model = Centred()
    opt = optimizer(model)
    (model(paddle.ones([4, 3])) ** 2).mean().backward()
    opt.step()
    opt.clear_grad()
    with pytest.raises(UnsupportedLayer, match="mixes the samples"):
        model(paddle.randn([4, 3]))


def test_a_model_that_cannot_be_replayed_is_said():
    class Consuming(nn.Layer):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, batch):
            return self.inner(batch.pop())

    class Fixed(nn.Layer):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x):
            return self.inner(x.reshape([4, 3]))

    for model, inputs, reason in [
        (Consuming(), [paddle.randn([4, 3])], "none of its inputs is a tensor with the batch on its first axis"),
        (Fixed(), paddle.randn([4, 3]), "running it on one row more raised ValueError"),
    ]:
        opt = optimizer(model)
        with pytest.warns(PrivacyWarning, match=f"could not be verified: {reason}"):
            loss = (model(inputs) ** 2).mean()
        loss.backward()
        opt.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model([paddle.randn([4, 3])] if isinstance(model, Consuming) else inputs)


def test_random_model_is_not_accused():
    class Random(nn.Layer):
        """Draws from a source that cannot be put back."""

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)
            self.source = np.random.default_rng(0)

        def forward(self, x):
            return self.inner(x + float(self.source.random()))

    model = Random()
    optimizer(model)
    with pytest.warns(PrivacyWarning, match="it computes something else when it is run again on the same inputs"):
        model(paddle.randn([4, 3]))


# Uses that no tap sees


class Functional(nn.Layer):
    """Uses a managed weight outside its layer."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how = nn.Linear(3, 3), how

    def forward(self, x):
        return self.how(self.inner, x)


LEAKED = (
    "parameters [{names}] got a gradient outside the captured layers (a functional use of the parameter, a direct "
    "call of layer.forward(), or another optimizer), which per-sample clipping would miss; use them only through "
    "layers called as layer(x), or clear the gradient"
)


@pytest.mark.parametrize("how", [
    lambda layer, x: F.linear(x, layer.weight, layer.bias),
    lambda layer, x: layer(x) + x @ layer.weight,
    lambda layer, x: layer(x) + layer.forward(x),
    lambda layer, x: layer(x) @ layer.weight.T,
    lambda layer, x: layer(x) * layer.weight.sum(),
    lambda layer, x: layer(x) * F.softmax(layer.weight, axis=-1).max(),
    lambda layer, x: (lambda w: layer(x) @ w)(layer.weight),
    lambda layer, x: layer(x) @ paddle.concat([layer.weight, layer.weight], axis=1),
    lambda layer, x: layer(x) + layer.bias * layer.bias,
    lambda layer, x: layer(x).add_(layer.bias),
])  # fmt: skip
def test_functional_use_inside_a_model_is_exact_or_refused(how):
    model = nn.Sequential(nn.Linear(3, 3), Functional(how))
    x = paddle.randn([4, 3])
    (model(x) ** 2).sum(1).mean().backward()
    expected = [p.grad.numpy() for p in model.parameters()]
    model.clear_gradients()
    try:
        opt = optimizer(model)
        for _ in range(2):
            start = [p.numpy() for p in model.parameters()]
            (model(x) ** 2).sum(1).mean().backward()
            opt.step()
            for parameter, gradient, value in zip(model.parameters(), expected, start):
                np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-4, atol=1e-5)
                parameter.set_value(paddle.to_tensor(value))
            opt.clear_grad()
    except PrivacyError as refused:
        assert "1.inner" in str(refused)


@pytest.mark.parametrize("use", [
    lambda model, x: (model(x) ** 2).mean() + (model[1].weight ** 2).sum(),
    lambda model, x: (F.linear(model[0](x), model[1].weight) ** 2).mean(),
    lambda model, x: (model[1].forward(model[0](x)) ** 2).mean(),
])  # fmt: skip
def test_functional_use_outside_a_model_is_refused_at_every_step(use):
    model = nn.LayerList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model.forward = lambda x: model[1](model[0](x))
    opt = optimizer(model)
    weight = model[1].weight.numpy()
    for _ in range(2):
        use(model, paddle.randn([4, 3])).backward()
        names = "'1.weight', '1.bias'" if model[1].bias.grad is not None else "'1.weight'"
        with pytest.raises(PrivacyError, match=exactly(LEAKED.format(names=names))):
            opt.step()
        opt.clear_grad()
    np.testing.assert_array_equal(weight, model[1].weight.numpy())


def test_a_use_that_begins_later_is_refused():
    later = []
    model = nn.Sequential(
        Functional(lambda layer, x: F.linear(x, layer.weight) if later else layer(x)), nn.Linear(3, 1)
    )
    opt = optimizer(model)
    step(model, opt, paddle.randn([4, 3]))
    opt.clear_grad()
    later.append(True)
    with pytest.raises(PrivacyError, match="parameters \\['0.inner.weight'\\] got a gradient outside"):
        step(model, opt, paddle.randn([4, 3]))


def test_gradient_filled_by_hand_is_refused():
    model = nn.Sequential(nn.Linear(3, 1))
    opt = optimizer(model)
    y = model(paddle.randn([4, 3]))
    model[0].weight.grad = paddle.ones([3, 1])
    (y**2).mean().backward()
    with pytest.raises(PrivacyError, match="parameters \\['0.weight'\\] got a gradient outside the captured layers"):
        opt.step()


def test_gradient_filled_after_backward_is_refused():
    model = nn.Sequential(nn.Linear(3, 1, bias_attr=False))
    opt = optimizer(model)
    (model(paddle.zeros([4, 3])) ** 2).mean().backward()
    model[0].weight.grad = paddle.ones([3, 1])
    with pytest.raises(PrivacyError, match="parameters \\['0.weight'\\] got a gradient outside the captured layers"):
        opt.step()


def test_parameter_smuggled_into_the_optimizer_is_refused():
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    opt = optimizer(model)
    opt._parameter_list.append(other.weight)
    x = paddle.randn([4, 3])
    before = other.weight.numpy()
    ((model(x) + other(x)) ** 2).mean().backward()
    with pytest.raises(
        PrivacyError,
        match=exactly(
            f"parameters ['{other.weight.name}'] were added after the optimizer was built, so their gradients are "
            "neither clipped nor noised; build a new optimizer with all parameters"
        ),
    ):
        opt.step()
    np.testing.assert_array_equal(before, other.weight.numpy())


def test_main_grad_is_refused():
    model = nn.Linear(3, 1)
    opt = optimizer(model)
    (model(paddle.randn([4, 3])) ** 2).mean().backward()
    model.weight.main_grad = paddle.ones([3, 1])
    with pytest.raises(
        PrivacyError,
        match=exactly(
            "parameters ['weight'] carry a main_grad, which Paddle's update would take instead of the noisy gradient; "
            "do not use mix_precision_utils with a private optimizer"
        ),
    ):
        opt.step()


def test_patched_instance_is_refused():
    model = nn.Sequential(nn.Linear(3, 1))
    opt = optimizer(model)
    step(model, opt, paddle.randn([4, 3]))
    model[0].forward = lambda x: F.linear(x, 2 * model[0].weight, model[0].bias)
    with pytest.raises(
        UnsupportedLayer,
        match=exactly(
            "layer '0' (Linear) has a forward of its own (the instance was patched), which the gradient rule of its "
            "class does not describe; put the change in a subclass"
        ),
    ):
        model(paddle.randn([4, 3]))


def test_pre_hook_registered_later_is_refused_and_post_hooks_are_exact():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 3,))
    model[0].register_forward_post_hook(lambda layer, inputs, output: output * 2)
    x = paddle.randn([4, 3])
    (model(x) ** 2).sum(1).mean().backward()
    expected = model[0].weight.grad.numpy()
    model.clear_gradients()
    opt = optimizer(model)
    (model(x) ** 2).sum(1).mean().backward()
    opt.step()
    np.testing.assert_allclose(model[0].weight.grad.numpy(), expected, rtol=1e-5)
    model[0].register_forward_pre_hook(lambda layer, inputs: None)
    with pytest.raises(
        UnsupportedLayer,
        match=exactly(
            "layer '0' (Linear) got a forward_pre_hook after the optimizer was built, which would run where the "
            "layer's parameters are captured; register hooks before building the optimizer"
        ),
    ):
        model(x)


@pytest.mark.parametrize("full_graph", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_static_graph_is_refused(full_graph, inside):
    static = paddle.jit.to_static(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), full_graph=full_graph)
    model = nn.Sequential(nn.Linear(3, 3), static) if inside else static
    optimizer(model)
    path = "1" if inside else "Sequential"
    with pytest.raises(
        UnsupportedLayer,
        match=exactly(
            f"'{path}' runs as a static graph (paddle.jit.to_static), in which layers cannot be seen; train the "
            "dygraph model, and convert it for deployment"
        ),
    ):
        model(paddle.randn([4, 3]))
    with paddle.no_grad():
        assert model(paddle.randn([4, 3])).shape == [4, 1]


def test_gradient_penalty_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    opt = optimizer(model)
    x = paddle.randn([4, 3])
    x.stop_gradient = False
    (slope,) = paddle.grad([model(x).sum()], [x], create_graph=True)
    (slope**2).sum(1).mean().backward()
    with pytest.raises(
        PrivacyError, match="^paddle.grad\\(create_graph=True\\) went through layer '2': the gradient of"
    ):
        opt.step()


def test_first_order_paddle_grad_does_not_count():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = paddle.randn([4, 3])
    x.stop_gradient = False
    opt = optimizer(model)
    y = model(x)
    (slope,) = paddle.grad([y.sum()], [x], retain_graph=True)
    (y**2).mean().backward()
    opt.step()
    assert opt.last_norms.shape == [4]


def test_activation_modified_in_place_is_refused():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    opt = optimizer(model)
    ids = paddle.to_tensor([[0, 1], [2, 3]])
    y = model(ids)
    ids.zero_()
    with pytest.raises(PrivacyError, match=exactly(
        "the input of layer '0' was modified in place after the layer read it; use the out-of-place operation"
    )):  # fmt: skip
        (y**2).mean().backward()
        opt.step()


# One sample, one bound


@pytest.mark.parametrize("between", [None, "clear"])
def test_two_backwards_over_one_batch(between):
    model = nn.Sequential(nn.Linear(3, 1))
    opt = optimizer(model, clip_norm=0.01)
    x = paddle.randn([4, 3])
    (model(x) ** 2).mean().backward()
    if between:
        opt.clear_grad()
    model(x).abs().mean().backward()
    if between:
        opt.step()
        assert opt.last_norms.shape == [4]
        return
    with pytest.raises(PrivacyError, match=exactly(
        "two backward() calls before one step() went through the same input tensor, so each of its rows would count "
        "twice (up to 2 × clip_norm); add the losses and call backward() once, or call clear_grad() between them"
    )):  # fmt: skip
        opt.step()


def test_two_backwards_through_one_forward_are_refused():
    model = nn.Sequential(nn.Linear(3, 1))
    opt = optimizer(model)
    loss = (model(paddle.randn([4, 3])) ** 2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(PrivacyError, match="^layer '0' got two gradients from one forward"):
        opt.step()


def test_accumulation_over_different_batches_is_exact():
    model = nn.Sequential(nn.Linear(3, 2))
    x = paddle.randn([8, 3])
    per_sample = one_by_one(model, lambda m, x: (m(x) ** 2).sum(1), [x], model.parameters())
    opt = optimizer(model, clip_norm=1.0, batch_size=8)
    for rows in (x[:4], x[4:]):
        (model(rows) ** 2).sum(1).mean().backward()
    opt.step()
    squared = sum((g.reshape(8, -1) ** 2).sum(1) for g in per_sample)
    factors = np.minimum(1, 1 / np.sqrt(squared))
    for parameter, g in zip(model.parameters(), per_sample):
        np.testing.assert_allclose(parameter.grad.numpy(), np.tensordot(factors, g, 1) / 8, rtol=1e-4, atol=1e-6)


def test_step_without_backward_and_wrong_model():
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    opt = optimizer(model)
    message = (
        "step() without a backward() through the layers that own this optimizer's parameters; call loss.backward() "
        "first, and check that the model in use is the one whose parameters the optimizer holds"
    )
    with pytest.raises(PrivacyError, match=exactly(message)):
        opt.step()
    (other(paddle.randn([4, 3])) ** 2).mean().backward()
    with pytest.raises(PrivacyError, match=exactly(message)):
        opt.step()


def test_parameter_exchanged_in_the_model_is_refused():
    model = nn.Sequential(nn.Linear(3, 1))
    opt = optimizer(model)
    model[0].weight = model[0].create_parameter([3, 1])
    with pytest.raises(
        PrivacyError,
        match=exactly(
            "layer '0' (Linear) holds another 'weight' than when the optimizer was built, so the optimizer would train "
            "a parameter that is not in the model; build the optimizer after the model is converted, wrapped or fixed"
        ),
    ):
        step(model, opt, paddle.randn([4, 3]))


def test_layer_exchanged_in_the_model_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer(model)
    model[0] = nn.Linear(3, 3)
    with pytest.raises(
        PrivacyError,
        match=exactly(
            "layer '0' (Linear), whose parameters ['weight', 'bias'] the optimizer holds, is no longer in "
            "'Sequential'; build the optimizer after the model is converted, wrapped or fixed"
        ),
    ):
        model(paddle.randn([4, 3]))


# Several optimizers, models and threads


def test_new_optimizer_supersedes_the_old_one():
    model = nn.Sequential(nn.Linear(3, 1))
    old = optimizer(model)
    (model(paddle.randn([4, 3])) ** 2).mean().backward()
    new = optimizer(model, clip_norm=1.0)
    x = paddle.randn([4, 3])
    (model(x) ** 2).mean().backward()
    with pytest.raises(
        PrivacyError,
        match=exactly(
            "another private optimizer was built over parameters ['0.weight', '0.bias'], and this one's hooks were "
            "taken off; step() the newer optimizer"
        ),
    ):
        old.step()
    new.step()
    assert new.last_norms.shape == [4]


def test_refused_optimizer_leaves_the_old_one_in_place():
    model = nn.Sequential(nn.Linear(3, 1))
    old = optimizer(model)
    with pytest.raises(ValueError, match="clip_norm must be greater than 0"):
        optimizer(model, clip_norm=-1.0)
    step(model, old, paddle.randn([4, 3]))


def test_dropped_optimizer_leaves_no_hooks():
    model = nn.Sequential(nn.Linear(3, 1))
    opt = optimizer(model)
    assert model[0]._forward_pre_hooks
    del opt
    gc.collect()
    for layer in model.sublayers(include_self=True):
        assert not layer._forward_pre_hooks and not layer._forward_post_hooks


def test_two_optimizers_on_disjoint_parts():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = paddle.randn([4, 3])
    (model(x) ** 2).mean().backward()
    expected = [p.grad.numpy() for p in model.parameters()]
    model.clear_gradients()
    one = optimizer(list(model[0].parameters()))
    with pytest.warns(PrivacyWarning, match="^two private optimizers train parts of one model; each states the ε of"):
        two = optimizer(list(model[2].parameters()))
    (model(x) ** 2).mean().backward()
    one.step()
    two.step()
    for parameter, gradient in zip(model.parameters(), expected):
        np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-4, atol=1e-6)


def test_two_models_do_not_meet():
    models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        opts = [optimizer(model) for model in models]
    x = paddle.randn([4, 3])
    losses = [(model(x) ** 2).mean() for model in models]
    losses[1].backward()
    losses[0].backward()
    for opt in opts:
        opt.step()
        assert opt.last_norms.shape == [4]


def test_threads_run_other_models_and_evaluate_this_one():
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    x = paddle.randn([4, 3])
    (model(x) ** 2).mean().backward()
    expected = [p.grad.numpy() for p in model.parameters()]
    model.clear_gradients()
    opt = optimizer(model)
    other = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    other_opt = optimizer(other)
    stop, errors = threading.Event(), []

    def evaluate():
        try:
            while not stop.is_set():
                with paddle.no_grad():
                    model(x)
        except Exception as error:
            errors.append(error)

    def train_other():
        try:
            while not stop.is_set():
                step(other, other_opt, paddle.randn([5, 3]))
                other_opt.clear_grad()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=f) for f in (evaluate, train_other)]
    for thread in threads:
        thread.start()
    try:
        start = [p.numpy() for p in model.parameters()]
        for _ in range(30):
            (model(x) ** 2).mean().backward()
            opt.step()
            for parameter, gradient, value in zip(model.parameters(), expected, start):
                np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-4, atol=1e-6)
                parameter.set_value(paddle.to_tensor(value))
            opt.clear_grad()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


# More rows than samples


class Indices(paddle.io.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return paddle.full([3], float(index))


COPIES = (
    "if the model runs each sample several times (augmented copies, positions flattened into the batch), a sample "
    "would reach several times its bound: run the copies in separate forwards and add their losses"
)


def test_more_rows_than_a_loaders_batch_are_refused():
    loader = paddle.io.DataLoader(Indices(), batch_size=4, shuffle=True)
    model = nn.Linear(3, 1)
    opt = DPSGD(
        parameters=model.parameters(), learning_rate=0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=4,
        data_loader=loader,
    )  # fmt: skip
    batch = next(iter(loader)).reshape([4, 3])
    twice = paddle.concat([batch, batch + 0.1])
    (model(twice) ** 2).mean().backward()
    message = f"a backward() had 8 rows where the data loader's batches have 4; {COPIES}"
    with pytest.raises(PrivacyError, match=exactly(message)):
        opt.step()


def test_more_rows_than_the_declared_batch_are_said_once():
    model = nn.Linear(3, 1)
    opt = optimizer(model, batch_size=4)
    message = f"a backward() had 20 rows where batch_size=4; {COPIES}, or pass the true batch_size"
    with pytest.warns(PrivacyWarning, match=exactly(message)):
        step(model, opt, paddle.randn([4, 5, 3]).reshape([-1, 3]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        opt.clear_grad()
        step(model, opt, paddle.randn([20, 3]))


def test_padding_trimmed_to_the_longest_sample_is_not_accused():
    class Trimming(nn.Layer):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(9, 3, padding_idx=0), nn.Linear(3, 1)

        def forward(self, ids):
            longest = int((ids != 0).sum(axis=1).max())
            return self.head(self.words(ids[:, :longest]).sum(axis=1))

    model = Trimming()
    opt = optimizer(model, batch_size=3)
    uneven = paddle.to_tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0]])
    even = paddle.to_tensor([[1, 2, 0, 0], [5, 6, 0, 0], [7, 8, 0, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        for ids in (uneven, even):
            step(model, opt, ids)
            opt.clear_grad()
    model, opt = (lambda m: (m, optimizer(m, batch_size=3)))(Trimming())
    with pytest.warns(PrivacyWarning, match="could not be verified: replacing samples changes the shape of"):
        for _ in range(10):
            step(model, opt, uneven[:2])
            opt.clear_grad()


# What depends on the data


class SortedByLength(nn.Layer):
    """Sorts the samples by length, as packing for recurrent kernels does, and forgets to put them back."""

    def __init__(self):
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(9, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, ids):
        order = (ids != 0).sum(axis=1).argsort(descending=True, stable=True)
        h = self.inner(self.words(ids).index_select(order, axis=0))
        return self.head(h.index_select(order.argsort(), axis=0).sum(axis=1))


def test_samples_sorted_inside_the_model_are_refused():
    model = SortedByLength()
    optimizer(model, batch_size=3)
    with pytest.raises(
        UnsupportedLayer, match="layer 'inner' \\(Linear\\) depends on other rows: 'SortedByLength' mixes"
    ):
        model(paddle.to_tensor([[1, 0, 0], [2, 3, 0], [4, 5, 6]]))


def test_samples_that_come_sorted_are_refused_as_well():
    model = SortedByLength()
    optimizer(model, batch_size=3)
    with pytest.raises(UnsupportedLayer, match="'SortedByLength' mixes"):
        model(paddle.to_tensor([[4, 5, 6], [2, 3, 0], [1, 0, 0]]))


def test_mixing_that_begins_later_is_found_by_a_later_look():
    model = SortedByLength()
    opt = optimizer(model, batch_size=3)
    even = paddle.to_tensor([[4, 5, 6], [2, 3, 4], [1, 7, 8]])
    for _ in range(63):
        step(model, opt, even)
        opt.clear_grad()
    with pytest.raises(UnsupportedLayer, match="'SortedByLength' mixes"):
        model(paddle.to_tensor([[1, 0, 0], [2, 3, 0], [4, 5, 6]]))


def test_layer_that_mixes_in_its_own_training_mode_only():
    class Mixing(nn.Layer):
        def forward(self, x):
            return x - x.mean(axis=0) if self.training else x

    model = nn.Sequential(nn.Linear(3, 3), Mixing(), nn.Linear(3, 1))
    opt = optimizer(model)
    model[1].eval()
    step(model, opt, paddle.randn([4, 3]))
    opt.clear_grad()
    model[1].train()
    with pytest.raises(UnsupportedLayer, match="^layer '1' \\(Mixing\\) mixes the samples"):
        model(paddle.randn([4, 3]))
