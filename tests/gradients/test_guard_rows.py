"""Activations whose rows are no samples, and layers that mix samples: each is refused."""

from __future__ import annotations

import re
import warnings

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_privacy import PrivacyWarning, UnsupportedLayer
from tests.gradients.guarded import _seeded, exactly, optimizer, step  # noqa: F401
from tests.oracle import one_by_one


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
