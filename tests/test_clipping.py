"""Each clipping: its closed form, its bound under every norm, and that one sample cannot move the sum further."""

from __future__ import annotations

import math
import re

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paddle import nn

from paddle_privacy import DPSGD, NoiseGenerator
from paddle_privacy.accounting import RDPAccountant
from paddle_privacy.accounting.events import Composed, Gaussian
from paddle_privacy.clipping import (
    AdaptiveClipping,
    AutomaticClipping,
    FlatClipping,
    PerLayerClipping,
    PSACClipping,
    make_clipping,
)

# What float32 rounding of the factor may add to a bound: c is rounded three times, each by 2^-24.
SLACK = 1e-6
BOUNDS = [0.01, 1.0, 3.7, 1e4]


def exactly(message):
    return "^" + re.escape(message) + "$"


def clippings(bound, blocks):
    return [
        FlatClipping(bound),
        PerLayerClipping(bound),
        PerLayerClipping([bound * (k + 1) for k in range(blocks)]),
        AutomaticClipping(bound),
        AutomaticClipping(bound, gamma=1e-6),
        PSACClipping(bound),
        PSACClipping(bound, r=100.0),
        AdaptiveClipping(bound),
    ]


norms = st.one_of(
    st.just(0.0), st.floats(1e-18, 1e18, allow_nan=False), st.floats(0.1, 10.0, allow_nan=False), st.just(3e18)
)


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.lists(norms, min_size=3, max_size=3), min_size=1, max_size=4),
    bound=st.sampled_from(BOUNDS),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_no_norm_exceeds_the_sensitivity(values, bound, dtype):
    squared = paddle.to_tensor(np.square(values), dtype=dtype)
    blocks = len(values)
    for clipping in clippings(bound, blocks):
        if not isinstance(clipping, PerLayerClipping):
            rows = squared.sum(axis=0, keepdim=True)
        else:
            rows = squared
            clipping.blocks([str(k) for k in range(blocks)])
        factors = clipping.factors(rows)
        assert factors.shape == rows.shape
        assert np.isfinite(factors.numpy()).all() and (factors.numpy() >= 0).all()
        contribution = factors.numpy().astype("float64") * np.sqrt(rows.numpy().astype("float64"))
        total = np.sqrt((contribution**2).sum(axis=0))
        assert (total <= clipping.sensitivity * (1 + SLACK)).all(), (clipping.name, total.max(), clipping.sensitivity)


@pytest.mark.parametrize("bound", BOUNDS)
def test_closed_forms(bound):
    g = np.array([0.0, 1e-9, 0.3, 1.0, 7.5, 1e6])
    squared = paddle.to_tensor(g[None] ** 2, dtype="float64")
    flat = np.minimum(1.0, bound / np.maximum(g, 1e-300))
    closed = [
        (FlatClipping(bound), flat),
        (AdaptiveClipping(bound), flat),
        # Bu et al. 2023, eq. (3.3) with gamma = 0.01.
        (AutomaticClipping(bound), bound / (g + 0.01)),
        # Xia et al. 2023, eq. (6) with r = 0.1.
        (PSACClipping(bound), bound / (g + 0.1 / (g + 0.1))),
    ]
    for clipping, expected in closed:
        np.testing.assert_allclose(clipping.factors(squared).numpy()[0], expected, rtol=1e-12)
        assert clipping.sensitivity == bound
    two = paddle.to_tensor(np.stack([g, 2 * g]) ** 2, dtype="float64")
    even = PerLayerClipping(bound).factors(two).numpy()
    np.testing.assert_allclose(even[1], np.minimum(1, bound / math.sqrt(2) / np.maximum(2 * g, 1e-300)), rtol=1e-12)
    listed = PerLayerClipping([bound, 3 * bound])
    np.testing.assert_allclose(listed.factors(two).numpy()[0], flat, rtol=1e-12)
    assert listed.sensitivity == pytest.approx(math.sqrt(10) * bound)
    assert PerLayerClipping(bound).sensitivity == bound


def network():
    paddle.seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def released_sum(x, y, clipping, clip_norm):
    """The un-noised clipped sum that a step would release, as one vector."""
    model = network()
    start = [p.numpy() for p in model.parameters()]
    optimizer = DPSGD(
        parameters=model.parameters(),
        learning_rate=1.0,
        clip_norm=clip_norm,
        clipping=clipping,
        noise_multiplier=0.0,
        batch_size=1,
        sampling="none",
    )
    (nn.functional.cross_entropy(model(x), y, reduction="none") * 50.0).mean().backward()
    sensitivity = optimizer.clipping.sensitivity
    optimizer.step()
    moved = [before.astype("float64") - p.numpy() for before, p in zip(start, model.parameters())]
    return np.concatenate([m.ravel() for m in moved]), sensitivity


@pytest.mark.parametrize("clipping, clip_norm", [
    ("flat", 1.0), ("flat", 0.05), ("per_layer", 0.5), ("per_layer", [0.3, 0.7]), ("automatic", 1.0), ("psac", 1.0),
    ("adaptive", 1.0),
])  # fmt: skip
def test_adding_one_sample_moves_the_sum_by_no_more_than_the_sensitivity(clipping, clip_norm):
    rng = np.random.default_rng(1)
    x = paddle.to_tensor(rng.normal(size=(9, 5)) * 3, dtype="float32")
    y = paddle.to_tensor(rng.integers(0, 3, 9))
    everyone, sensitivity = released_sum(x, y, clipping, clip_norm)
    for left_out in (0, 4, 8):
        kept = paddle.to_tensor([i for i in range(9) if i != left_out])
        others, _ = released_sum(x.index_select(kept), y.index_select(kept), clipping, clip_norm)
        distance = np.linalg.norm(everyone - others)
        # The weights are float32, so a difference of two of them is rounded by some 1e-7 of the weights.
        assert 0 < distance <= sensitivity * (1 + SLACK) + 1e-5


def test_per_layer_blocks_follow_the_layers():
    clipping = PerLayerClipping([1.0, 2.0])
    assert clipping.blocks(["a", "b", "a", "b"]) == [0, 1, 0, 1]
    with pytest.raises(
        ValueError, match=exactly("clip_norm lists 2 bounds for 3 layers with parameters: ['a', 'b', 'c']")
    ):
        clipping.blocks(["a", "b", "c"])
    assert FlatClipping(1.0).blocks(["a", "b"]) == [0, 0]


# Adaptive clipping (Andrew et al. 2021)


def test_adaptive_update_is_geometric_and_its_count_centred():
    clipping = AdaptiveClipping(2.0, quantile=0.3, learning_rate=0.5, count_noise=4.0)
    seen = []

    def noised(value, std):
        seen.append((value, std))
        return value + 1.5

    clipping.after_step(paddle.to_tensor([1.0, 2.0, 3.0, 0.5]), 10.0, noised)
    # Three of four are below: the count is centred so that adding or removing a sample moves it by 1/2.
    assert seen == [(3 - 2.0, 4.0)]
    assert clipping.clip_norm == pytest.approx(2.0 * math.exp(-0.5 * ((1.0 + 1.5) / 10.0 + 0.5 - 0.3)))


@pytest.mark.parametrize("norm", [0.1, 9.0])
def test_adaptive_count_moves_by_one_half(norm):
    def released(values):
        counts = []
        AdaptiveClipping(1.0, count_noise=1.0).after_step(
            paddle.to_tensor(values), 10.0, lambda value, std: counts.append(value) or value
        )
        return counts[0]

    assert abs(released([0.5, 3.0, norm]) - released([0.5, 3.0])) == 0.5


def test_adaptive_count_is_charged():
    clipping = AdaptiveClipping(1.0, count_noise=6.4)
    event = clipping.mechanism(1.1)
    assert event == Composed((Gaussian(1.1), Gaussian(12.8)))
    both, alone, one = RDPAccountant(), RDPAccountant(), RDPAccountant()
    both.compose(event, 10)
    alone.compose(Gaussian(1.1), 10)
    one.compose(Gaussian(1 / math.sqrt(1 / 1.1**2 + 1 / 12.8**2)), 10)
    assert both.get_epsilon(1e-5) > alone.get_epsilon(1e-5)
    assert both.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-9)


def test_adaptive_count_is_charged_by_the_optimizer_and_left_room_for_in_calibration():
    def run(**kwargs):
        model = network()
        optimizer = DPSGD(
            parameters=model.parameters(), learning_rate=0.1, clip_norm=1.0, batch_size=20, dataset_size=100,
            sampling="poisson", **kwargs,
        )  # fmt: skip
        for _ in range(3):
            (model(paddle.randn([20, 5])) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        return optimizer

    flat, adaptive = run(noise_multiplier=1.0), run(noise_multiplier=1.0, clipping="adaptive")
    assert adaptive.clipping.count_noise == 1.0
    assert adaptive.get_privacy_spent(1e-5).epsilon > flat.get_privacy_spent(1e-5).epsilon
    assert adaptive.clip_norm != 1.0
    plan = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 1}
    calibrated, calibrated_adaptive = run(**plan), run(**plan, clipping=AdaptiveClipping(1.0, count_noise=2.0))
    assert calibrated_adaptive.noise_multiplier > calibrated.noise_multiplier
    assert calibrated_adaptive.get_privacy_spent().epsilon <= 3.0


def test_adaptive_finds_the_quantile():
    rng = np.random.default_rng(0)
    clipping = AdaptiveClipping(0.01, quantile=0.8, count_noise=5.0)
    for _ in range(150):
        sample = paddle.to_tensor(rng.lognormal(1.0, 0.5, 200), dtype="float32")
        clipping.after_step(sample, 200.0, lambda value, std: value + std * rng.normal())
    assert clipping.clip_norm == pytest.approx(np.exp(1.0 + 0.5 * 0.8416), rel=0.1)


def test_adaptive_state_continues():
    clipping = AdaptiveClipping(2.0, count_noise=4.0)
    clipping.after_step(paddle.ones([5]), 5.0, lambda value, std: value)
    resumed = AdaptiveClipping(2.0, count_noise=1.0)
    resumed.load_state_dict(clipping.state_dict())
    assert (resumed.clip_norm, resumed.count_noise) == (clipping.clip_norm, 4.0)
    with pytest.raises(ValueError, match="^the saved state is of clipping 'adaptive', this optimizer clips 'flat'"):
        FlatClipping(1.0).load_state_dict(clipping.state_dict())


# One source of truth


@pytest.mark.parametrize("moment", ["before clipping", "after clipping"])
@pytest.mark.parametrize("to", [0.01, 100.0])
def test_noise_follows_the_bound_that_clipped(moment, to, monkeypatch):
    """Whoever sets the bound by hand between two micro-batches gets noise for the larger of the two."""
    monkeypatch.setattr("paddle_privacy.optimizer.fused_update", lambda *args: False)
    model = network()
    optimizer = DPSGD(
        parameters=model.parameters(), learning_rate=0.1, clip_norm=1.0, noise_multiplier=2.0, batch_size=8,
        sampling="none", generator=NoiseGenerator.seeded(0), secure=False,
    )  # fmt: skip
    stds = []
    monkeypatch.setattr(optimizer.noise, "add_noise", lambda sums, std: stds.append(std))
    (model(paddle.randn([4, 5])) ** 2).sum(1).mean().backward()
    # The forward of the second micro-batch ends the first.
    second = model(paddle.randn([4, 5]))
    if moment == "before clipping":
        optimizer.clipping.clip_norm = to
    (second**2).sum(1).mean().backward()
    if moment == "after clipping":
        model(paddle.randn([4, 5]))
        optimizer.clipping.clip_norm = to
    optimizer.step()
    assert stds == [2.0 * max(1.0, to if moment == "before clipping" else 1.0)]


@pytest.mark.parametrize("clipping, clip_norm, error, message", [
    ("flat", None, ValueError, "clip_norm is missing: the bound C on each sample's gradient norm, a positive number"),
    ("flat", 0, ValueError, "clip_norm must be greater than 0, found 0"),
    ("flat", float("nan"), ValueError, "clip_norm must be greater than 0, found nan"),
    ("flat", True, TypeError, "clip_norm must be a positive number, found True"),
    ("flat", "1", TypeError, "clip_norm must be a positive number, found '1'"),
    ("flat", [1.0], TypeError, "clip_norm must be a positive number, found [1.0]"),
    ("per_layer", [], ValueError, "clip_norm must be a positive number or a list of one bound per layer, found []"),
    ("per_layer", [1.0, -1.0], ValueError, "clip_norm must be greater than 0, found -1.0"),
    ("median", 1.0, ValueError,
     "clipping must be one of ['adaptive', 'automatic', 'flat', 'per_layer', 'psac'] or a Clipping, found 'median'"),
    (FlatClipping(1.0), 2.0, ValueError,
     "clip_norm=2.0 contradicts the bound 1.0 of FlatClipping; give the bound once"),
])  # fmt: skip
def test_refused_arguments(clipping, clip_norm, error, message):
    with pytest.raises(error, match=exactly(message)):
        make_clipping(clipping, clip_norm, 10.0)


@pytest.mark.parametrize("make, message", [
    (lambda: AdaptiveClipping(1.0, quantile=1.0), "quantile must be in (0, 1), found 1.0"),
    (lambda: AdaptiveClipping(1.0, count_noise=0.0), "count_noise must be greater than 0, found 0.0"),
    (lambda: AutomaticClipping(1.0, gamma=0.0), "gamma must be greater than 0, found 0.0"),
    (lambda: PSACClipping(1.0, r=-1.0), "r must be greater than 0, found -1.0"),
])  # fmt: skip
def test_refused_settings(make, message):
    with pytest.raises(ValueError, match=exactly(message)):
        make()
