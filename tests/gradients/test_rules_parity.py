"""Every gradient rule against one-by-one autograd, layer by layer and configuration by configuration."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_privacy.gradients import factors
from tests.gradients.parity import assert_parity, built, projected_loss, randomise, tensor

B = 3


def floats(*shape: int, seed: int = 1):
    return lambda dtype: tensor(np.random.default_rng(seed).standard_normal([B, *shape]), dtype)


def ids(*shape: int, high: int = 5):
    # Few ids, so that they repeat within and across samples.
    return lambda dtype: paddle.to_tensor(np.random.default_rng(2).integers(0, high, [B, *shape]))


CASES = {
    "linear-2d": (lambda: nn.Linear(4, 3), floats(4)),
    "linear-3d": (lambda: nn.Linear(4, 3), floats(6, 4)),
    "linear-3d-short": (lambda: nn.Linear(9, 8), floats(2, 9)),
    "linear-4d": (lambda: nn.Linear(4, 3), floats(2, 3, 4)),
    "linear-no-bias": (lambda: nn.Linear(4, 3, bias_attr=False), floats(5, 4)),
    "linear-one-position": (lambda: nn.Linear(4, 3), floats(1, 4)),
    "embedding-1d": (lambda: nn.Embedding(6, 4), ids()),
    "embedding-2d": (lambda: nn.Embedding(6, 4), ids(7)),
    "embedding-3d": (lambda: nn.Embedding(6, 4), ids(3, 4)),
    "embedding-padding": (lambda: nn.Embedding(6, 4, padding_idx=0), ids(7, high=3)),
    "embedding-padding-negative": (lambda: nn.Embedding(6, 4, padding_idx=-4), ids(7, high=3)),
    "embedding-padding-last": (lambda: nn.Embedding(3, 4, padding_idx=-1), ids(7, high=3)),
    "layernorm": (lambda: nn.LayerNorm(5), floats(4, 5)),
    "layernorm-2d": (lambda: nn.LayerNorm(5), floats(5)),
    "layernorm-multi-axis": (lambda: nn.LayerNorm([4, 5]), floats(2, 4, 5)),
    "layernorm-all-axes": (lambda: nn.LayerNorm([2, 4, 5]), floats(2, 4, 5)),
    "layernorm-no-bias": (lambda: nn.LayerNorm(5, bias_attr=False), floats(4, 5)),
    "layernorm-no-weight": (lambda: nn.LayerNorm(5, weight_attr=False), floats(4, 5)),
    "groupnorm-nchw": (lambda: nn.GroupNorm(2, 6), floats(6, 3, 2)),
    "groupnorm-nhwc": (lambda: nn.GroupNorm(2, 6, data_format="NHWC"), floats(3, 2, 6)),
    "groupnorm-ncl": (lambda: nn.GroupNorm(3, 6, data_format="NCL"), floats(6, 4)),
    "groupnorm-ncdhw": (lambda: nn.GroupNorm(3, 6, data_format="NCDHW"), floats(6, 2, 3, 2)),
    "groupnorm-one-channel-a-group": (lambda: nn.GroupNorm(6, 6), floats(6, 3, 2)),
    "groupnorm-nc": (lambda: nn.GroupNorm(3, 6), floats(6)),
    "groupnorm-no-bias": (lambda: nn.GroupNorm(3, 6, bias_attr=False), floats(6, 3, 2)),
    "groupnorm-no-weight": (lambda: nn.GroupNorm(3, 6, weight_attr=False), floats(6, 3, 2)),
    "conv1d": (lambda: nn.Conv1D(4, 6, 3), floats(4, 7)),
    "conv1d-padded": (lambda: nn.Conv1D(4, 6, 3, stride=2, padding=1, dilation=2), floats(4, 9)),
    "conv1d-pair": (lambda: nn.Conv1D(4, 6, 3, padding=[2, 1]), floats(4, 7)),
    "conv1d-same": (lambda: nn.Conv1D(4, 6, 4, stride=2, padding="SAME"), floats(4, 7)),
    "conv1d-groups-nlc": (lambda: nn.Conv1D(4, 6, 3, groups=2, data_format="NLC"), floats(7, 4)),
    "conv1d-reflect": (lambda: nn.Conv1D(4, 6, 3, padding=2, padding_mode="reflect"), floats(4, 7)),
    "conv1d-circular": (lambda: nn.Conv1D(4, 6, 3, padding=2, padding_mode="circular"), floats(4, 7)),
    "conv1d-replicate": (lambda: nn.Conv1D(4, 6, 3, padding=2, padding_mode="replicate"), floats(4, 7)),
    "conv2d": (lambda: nn.Conv2D(4, 6, 3), floats(4, 6, 5)),
    "conv2d-no-bias": (lambda: nn.Conv2D(4, 6, 3, bias_attr=False), floats(4, 6, 5)),
    "conv2d-pointwise": (lambda: nn.Conv2D(4, 6, 1), floats(4, 6, 5)),
    "conv2d-wide": (lambda: nn.Conv2D(16, 24, 3, padding=1), floats(16, 3, 3)),
    "conv2d-stride-pad": (lambda: nn.Conv2D(4, 6, [3, 2], stride=[2, 1], padding=[1, 2]), floats(4, 6, 5)),
    "conv2d-four-pads": (lambda: nn.Conv2D(4, 6, 3, padding=[0, 1, 2, 1]), floats(4, 6, 5)),
    "conv2d-pairs": (lambda: nn.Conv2D(4, 6, 3, padding=[[0, 0], [0, 0], [1, 2], [0, 1]]), floats(4, 6, 5)),
    "conv2d-same": (lambda: nn.Conv2D(4, 6, 4, stride=3, padding="SAME"), floats(4, 8, 7)),
    "conv2d-same-dilated": (lambda: nn.Conv2D(4, 6, 3, dilation=2, padding="SAME"), floats(4, 8, 7)),
    "conv2d-valid": (lambda: nn.Conv2D(4, 6, 3, padding="VALID"), floats(4, 6, 5)),
    "conv2d-dilation": (lambda: nn.Conv2D(4, 6, 3, dilation=[2, 1], padding=1), floats(4, 6, 5)),
    "conv2d-groups": (lambda: nn.Conv2D(4, 6, 3, groups=2), floats(4, 6, 5)),
    "conv2d-depthwise": (lambda: nn.Conv2D(4, 8, 3, groups=4), floats(4, 6, 5)),
    "conv2d-nhwc": (lambda: nn.Conv2D(4, 6, 3, padding=1, data_format="NHWC"), floats(6, 5, 4)),
    "conv2d-nhwc-groups": (lambda: nn.Conv2D(4, 6, 3, groups=2, data_format="NHWC"), floats(6, 5, 4)),
    "conv2d-nhwc-pairs": (
        lambda: nn.Conv2D(4, 6, 3, padding=[[0, 0], [1, 2], [0, 1], [0, 0]], data_format="NHWC"),
        floats(6, 5, 4),
    ),
    "conv2d-reflect": (lambda: nn.Conv2D(4, 6, 3, padding=2, padding_mode="reflect"), floats(4, 6, 5)),
    "conv2d-circular": (lambda: nn.Conv2D(4, 6, 3, padding=1, padding_mode="circular"), floats(4, 6, 5)),
    "conv2d-replicate": (lambda: nn.Conv2D(4, 6, 3, padding=1, padding_mode="replicate"), floats(4, 6, 5)),
    "conv3d": (lambda: nn.Conv3D(2, 4, 2, stride=[1, 2, 1]), floats(2, 3, 4, 3)),
    "conv3d-groups-padded": (lambda: nn.Conv3D(2, 4, 3, padding=1, groups=2), floats(2, 3, 4, 3)),
    "conv3d-same-ndhwc": (lambda: nn.Conv3D(2, 4, 3, padding="SAME", data_format="NDHWC"), floats(3, 4, 3, 2)),
    # Few cells and many channels: kept as they are, by the norms' Gram matrices and the sum within one product.
    "conv1d-kept": (lambda: nn.Conv1D(16, 24, 3, padding=1), floats(16, 4)),
    "conv2d-kept-groups": (lambda: nn.Conv2D(16, 24, 3, padding=1, groups=2), floats(16, 3, 3)),
    "conv2d-kept-depthwise": (lambda: nn.Conv2D(4, 64, 3, padding=1, groups=4), floats(4, 2, 1)),
    "conv2d-kept-nhwc-same": (
        lambda: nn.Conv2D(16, 24, 4, stride=2, padding="SAME", data_format="NHWC"),
        floats(5, 4, 16),
    ),
    "conv2d-kept-reflect": (lambda: nn.Conv2D(16, 24, 3, padding=1, padding_mode="reflect"), floats(16, 3, 2)),
    "conv2d-kept-pointwise": (lambda: nn.Conv2D(32, 40, 1), floats(32, 2, 2)),
    "conv3d-kept": (lambda: nn.Conv3D(8, 24, 2, stride=[1, 2, 1]), floats(8, 3, 4, 3)),
    "conv2d-transpose-kept": (lambda: nn.Conv2DTranspose(24, 16, 3, stride=2, groups=2), floats(24, 2, 3)),
    # Kept, but with more cells than rows: norms and sum from gradients formed a few at a time.
    "conv2d-kept-many-cells": (lambda: nn.Conv2D(8, 8, 3, padding=1), floats(8, 4, 4)),
    "conv2d-kept-many-cells-wide": (lambda: nn.Conv2D(40, 40, 3, padding=1), floats(40, 7, 6)),
    "conv1d-transpose": (lambda: nn.Conv1DTranspose(4, 6, 3, stride=2, padding=1), floats(4, 5)),
    "conv1d-transpose-nlc": (lambda: nn.Conv1DTranspose(4, 6, 3, groups=2, data_format="NLC"), floats(5, 4)),
    "conv2d-transpose": (lambda: nn.Conv2DTranspose(4, 6, 3), floats(4, 4, 3)),
    "conv2d-transpose-output-padding": (
        lambda: nn.Conv2DTranspose(4, 6, 3, stride=3, padding=1, output_padding=2),
        floats(4, 4, 3),
    ),
    "conv2d-transpose-groups": (lambda: nn.Conv2DTranspose(4, 6, 3, stride=2, groups=2), floats(4, 4, 3)),
    "conv2d-transpose-dilation": (lambda: nn.Conv2DTranspose(4, 6, 3, dilation=2, padding=[2, 1]), floats(4, 4, 3)),
    "conv2d-transpose-same": (lambda: nn.Conv2DTranspose(4, 6, 4, stride=2, padding="SAME"), floats(4, 4, 3)),
    "conv2d-transpose-pairs-nhwc": (
        lambda: nn.Conv2DTranspose(4, 6, 3, stride=2, padding=[[0, 0], [1, 2], [0, 1], [0, 0]], data_format="NHWC"),
        floats(4, 3, 4),
    ),
    "conv3d-transpose": (lambda: nn.Conv3DTranspose(2, 4, 2, stride=2, padding=1), floats(2, 3, 3, 2)),
    # Behind a layer: plain Paddle cannot differentiate an instance norm or a PReLU whose input wants no gradient.
    "instancenorm1d": (lambda: nn.Sequential(nn.Conv1D(4, 4, 1), nn.InstanceNorm1D(4)), floats(4, 6)),
    "instancenorm2d": (lambda: nn.Sequential(nn.Conv2D(4, 4, 1), nn.InstanceNorm2D(4)), floats(4, 3, 2)),
    "instancenorm3d": (lambda: nn.Sequential(nn.Conv3D(4, 4, 1), nn.InstanceNorm3D(4)), floats(4, 3, 2, 2)),
    "prelu-one": (lambda: nn.Sequential(nn.Linear(3, 3), nn.PReLU()), floats(4, 3)),
    "prelu-channels": (lambda: nn.Sequential(nn.Linear(2, 2), nn.PReLU(4)), floats(4, 3, 2)),
    "prelu-channels-2d": (lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(4)), floats(4)),
    "prelu-channels-last": (lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(4, data_format="NHWC")), floats(3, 2, 4)),
    "bilinear": (lambda: nn.Bilinear(4, 3, 5), lambda dtype: [floats(4)(dtype), floats(3, seed=4)(dtype)]),
    "bilinear-no-bias": (
        lambda: nn.Bilinear(4, 3, 5, bias_attr=False),
        lambda dtype: [floats(4)(dtype), floats(3, seed=4)(dtype)],
    ),
}


def as_list(inputs) -> list:
    return inputs if isinstance(inputs, list) else [inputs]


@pytest.mark.parametrize("name", CASES)
def test_rule_equals_one_by_one_autograd(name):
    build, inputs = CASES[name]
    for dtype in ("float64", "float32"):
        paddle.seed(0)
        model = randomise(built(build, dtype))
        reduction = "mean" if dtype == "float64" else "sum"
        factors = assert_parity(model, projected_loss(dtype), as_list(inputs(dtype)), dtype=dtype, reduction=reduction)
        assert set(factors) == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("elements", [1, 1000])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("conv")])
def test_convolutions_a_few_samples_at_a_time(name, elements, monkeypatch):
    """With 1, each sample for itself; with 1,000, one to three of the three together, by the size of the case."""
    monkeypatch.setattr(factors, "_CHUNK_ELEMENTS", elements)
    build, inputs = CASES[name]
    made = assert_parity(randomise(built(build, "float64")), projected_loss(), as_list(inputs("float64")))
    assert isinstance(made["weight"], factors.Unfolded) or "kept" not in name


@pytest.mark.parametrize("name", ["conv2d", "conv2d-stride-pad", "conv2d-groups", "conv2d-kept-groups"])
def test_convolutions_formed_or_kept_are_the_same(name, monkeypatch):
    """The choice is one of cost: each case by the way it would not go."""
    build, inputs = CASES[name]
    model = randomise(built(build, "float64"))
    natural = assert_parity(model, projected_loss(), as_list(inputs("float64")))["weight"]
    kept = isinstance(natural, factors.Unfolded)
    monkeypatch.setattr(
        factors.Unfolded, "formed_or_lazy", lambda self: factors.Dense(self.per_sample()) if kept else self
    )
    other = assert_parity(model, projected_loss(), as_list(inputs("float64")))["weight"]
    assert isinstance(other, factors.Dense if kept else factors.Unfolded)


def test_a_convolution_of_no_samples():
    use = factors.Use(paddle.zeros([0, 6, 9]), paddle.zeros([0, 4, 5, 5]), lambda x: x)
    empty = factors.Unfolded([use], 2, [6, 2, 3, 3])
    assert empty.squared_norms().shape == [0] and empty.per_sample().shape == [0, 6, 2, 3, 3]
    total = empty.weighted_sum(paddle.zeros([0]))
    assert total.shape == [6, 2, 3, 3] and not total.numpy().any()


def test_sparse_embedding_equals_the_dense_one():
    dense, sparse = (built(lambda s=s: nn.Embedding(6, 4, sparse=s), "float64") for s in (False, True))
    sparse.set_state_dict(dense.state_dict())
    assert_parity(sparse, projected_loss(), [ids(7)("")], oracle_model=dense)


class Twice(nn.Layer):
    """The same layer run twice, the second time on what the first gave."""

    def __init__(self, layer: nn.Layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(paddle.tanh(self.layer(x)))


class Shared(nn.Layer):
    """Two layers with the same parameters."""

    def __init__(self, first: nn.Layer, second: nn.Layer, names: list):
        super().__init__()
        self.first, self.second = first, second
        for name in names:
            setattr(second, name, getattr(first, name))

    def forward(self, x):
        return self.first(x) + paddle.sin(self.second(x * x if x.is_floating_point() else x // 2))


REPEATS = {
    "linear": (lambda: Twice(nn.Linear(4, 4)), floats(6, 4)),
    "linear-2d": (lambda: Twice(nn.Linear(4, 4)), floats(4)),
    "layernorm": (lambda: Twice(nn.LayerNorm(5)), floats(4, 5)),
    "groupnorm": (lambda: Twice(nn.GroupNorm(2, 6)), floats(6, 3, 2)),
    "conv2d": (lambda: Twice(nn.Conv2D(4, 4, 3, padding=1)), floats(4, 4, 3)),
    "conv2d-wide": (lambda: Twice(nn.Conv2D(12, 12, 3, padding=1)), floats(12, 2, 2)),
    "conv2d-kept": (lambda: Twice(nn.Conv2D(12, 12, 3, padding=1)), floats(12, 2, 1)),
    "conv2d-kept-groups": (lambda: Twice(nn.Conv2D(16, 16, 3, padding=1, groups=2)), floats(16, 2, 2)),
    # Kept in the one layer, formed in the other.
    "shared-conv-strided": (
        lambda: Shared(nn.Conv2D(4, 8, 3, padding=1), nn.Conv2D(4, 8, 3, stride=5, padding=1), ["weight"]),
        floats(4, 5, 5),
    ),
    "conv2d-groups": (lambda: Twice(nn.Conv2D(4, 4, 3, padding=1, groups=2)), floats(4, 4, 3)),
    "instancenorm": (lambda: nn.Sequential(nn.Conv2D(4, 4, 1), Twice(nn.InstanceNorm2D(4))), floats(4, 3, 2)),
    "prelu": (lambda: nn.Sequential(nn.Linear(3, 3), Twice(nn.PReLU(4))), floats(4, 3)),
    "conv2d-transpose": (lambda: Twice(nn.Conv2DTranspose(4, 4, 3, padding=1)), floats(4, 4, 3)),
    "shared-linear": (lambda: Shared(nn.Linear(4, 3), nn.Linear(4, 3), ["weight", "bias"]), floats(5, 4)),
    "shared-weight-only": (lambda: Shared(nn.Linear(4, 3), nn.Linear(4, 3), ["weight"]), floats(5, 4)),
    "shared-embedding": (lambda: Shared(nn.Embedding(6, 4), nn.Embedding(6, 4), ["weight"]), ids(5)),
    "shared-conv": (
        lambda: Shared(nn.Conv2D(4, 6, 3), nn.Conv2D(4, 6, 3, groups=1), ["weight", "bias"]),
        floats(4, 5, 5),
    ),
    "shared-layernorm": (lambda: Shared(nn.LayerNorm(5), nn.LayerNorm(5), ["weight", "bias"]), floats(4, 5)),
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", REPEATS)
def test_repeated_and_tied_parameters_carry_their_cross_terms(name, reduction):
    build, inputs = REPEATS[name]
    model = randomise(built(build, "float64"))
    assert_parity(model, projected_loss(), [inputs("float64")], reduction=reduction)
