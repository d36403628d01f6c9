"""Per-layer clipping sums each layer while the backward pass goes on: exact, and early where that saves memory."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base import core
from paddle.distributed.fleet.utils import recompute

from paddle_privacy import DPSGD, PrivacyError, PrivacyWarning
from paddle_privacy.clipped_sum import ClippedSum
from tests.oracle import one_by_one


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    monkeypatch.setattr("paddle_privacy.optimizer.fused_update", lambda *args: False)
    paddle.seed(0)


@pytest.fixture
def early(monkeypatch):
    """How many layers were summed before the end of the backward pass."""
    layers = []
    original = ClippedSum.add_layer

    def add_layer(self, group, keys, scale):
        original(self, group, keys, scale)
        layers.append(group.taken.issuperset(keys))

    monkeypatch.setattr(ClippedSum, "add_layer", add_layer)
    return layers


class Blocks(nn.Layer):
    def __init__(self, how=None, shared=False):
        super().__init__()
        self.how = how
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.LayerList(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(3))
        if shared:
            self.blocks[2] = self.blocks[0]
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + (block(x) if self.how is None else recompute(block, x, use_reentrant=self.how))
        return self.head(x)


def losses(model, x):
    return (model(x) ** 2).reshape([len(x), -1]).sum(axis=1)


def build(model, **kwargs):
    kwargs.setdefault("clip_norm", 2.0)
    return DPSGD(
        parameters=model.parameters(), learning_rate=0.0, noise_multiplier=0.0, batch_size=5, sampling="none",
        clipping="per_layer", **kwargs,
    )  # fmt: skip


def expected_sums(model, x, bound):
    """Each layer's weight and bias clipped together, to C/√L."""
    layers = list({id(layer): layer for layer in model.sublayers() if isinstance(layer, nn.Linear)}.values())
    sums = {}
    for layer in layers:
        parameters = [layer.weight, layer.bias]
        per_sample = one_by_one(model, losses, [x], parameters)
        norms = np.sqrt(sum((g.reshape(len(x), -1) ** 2).sum(1) for g in per_sample))
        factors = np.minimum(1.0, bound / np.sqrt(len(layers)) / norms)
        for parameter, g in zip(parameters, per_sample):
            sums[id(parameter)] = np.tensordot(factors, g, axes=1)
    return sums


@pytest.mark.parametrize("how", [None, True, False])
@pytest.mark.parametrize("shared", [False, True])
def test_exact_with_and_without_recompute(how, shared, early):
    model = Blocks(shared=shared)
    x = paddle.randn([5, 4, 3])
    expected = expected_sums(model, x, 2.0)
    total = np.sqrt(sum((g.reshape(5, -1) ** 2).sum(1) for g in one_by_one(model, losses, [x], model.parameters())))
    model.how = how
    optimizer = build(model)
    for _ in range(2):
        early.clear()
        losses(model, x).mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            np.testing.assert_allclose(parameter.grad.numpy(), expected[id(parameter)] / 5, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(optimizer.last_norms.numpy(), total, rtol=1e-5)
        optimizer.clear_grad()
        # Non-reentrant recompute runs some layers again before their gradient is there; these are summed at the end.
        layers = 6 if shared else 8
        assert early == [True] * layers if how is not False else 2 <= len(early) < layers


def test_tied_weights_wait_for_their_last_use(early):
    class Tied(nn.Layer):
        def __init__(self):
            super().__init__()
            self.words, self.inner = nn.Embedding(7, 4), nn.Linear(4, 4)

        def forward(self, ids):
            return paddle.matmul(self.inner(self.words(ids)), self.words.weight, transpose_y=True)

    model = Tied()
    ids = paddle.to_tensor(np.arange(15).reshape(5, 3) % 7)
    per_sample = one_by_one(model, losses, [ids], [model.words.weight])[0]
    norms = np.sqrt((per_sample.reshape(5, -1) ** 2).sum(1))
    expected = np.tensordot(np.minimum(1.0, 2.0 / np.sqrt(2) / norms), per_sample, axes=1)
    optimizer = build(model)
    for step in range(2):
        early.clear()
        losses(model, ids).mean().backward()
        optimizer.step()
        np.testing.assert_allclose(model.words.weight.grad.numpy(), expected / 5, rtol=1e-4, atol=1e-6)
        optimizer.clear_grad()
        # The first forward is run once more, to find the tie; its own layers then wait for a gradient in vain.
        assert early == [True] * step


def test_a_use_after_the_sum_is_refused(early):
    """A forward left over from before the last step joins a later backward pass: one more use than was counted."""
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = build(model)
    x = paddle.randn([5, 3])
    kept = model(x)
    losses(model, x).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    later = model(paddle.randn([5, 3]))
    with pytest.raises(PrivacyError, match="^a parameter of layer '0' got another gradient after the layer's samples"):
        # The graph of `kept` hangs below that of `later`, so its gradient comes last.
        (later * 1.0 + (kept * 2.0).tanh().tanh()).sum(axis=1).mean().backward()
        optimizer.step()


def test_sample_that_is_not_finite_in_one_layer(early):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    x = paddle.randn([5, 3])
    x[2] = float("inf")
    optimizer = build(model)
    with pytest.warns(PrivacyWarning, match="^1 sample\\(s\\) had a gradient that is not finite and were left out$"):
        (model(x) ** 2).sum(1).mean().backward()
        optimizer.step()
    assert optimizer.last_norms.shape == [4]
    assert all(np.isfinite(p.grad.numpy()).all() for p in model.parameters())


def test_recomputes_saving_is_kept():
    """Reentrant recompute saves at least half of the peak memory with per-layer clipping, as in plain Paddle."""

    def peak(how):
        class Deep(nn.Layer):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(64, 64)
                self.blocks = nn.LayerList(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(8))

            def forward(self, x):
                x = self.first(x)
                for block in self.blocks:
                    x = block(x) if how is None else recompute(block, x, use_reentrant=how)
                return x

        model = Deep()
        optimizer = build(model)
        x = paddle.randn([8, 256, 64])
        for _ in range(2):
            core.host_memory_stat_reset_peak_value("Allocated", 0)
            before = core.host_memory_stat_current_value("Allocated", 0)
            losses(model, x).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        return core.host_memory_stat_peak_value("Allocated", 0) - before

    assert peak(True) < 0.5 * peak(None)
