"""Counts of what a private step must cost, against counts by hand."""

from __future__ import annotations

import paddle
import pytest
from floors import Rates, Use, extra_seconds, floor_bytes, floor_seconds, ghost_multiply_adds, held_bytes, uses_of
from paddle import nn
from workloads import QUICK

# One unit of time for a multiply-add and for a value of noise, four for a float that is read or written.
UNIT = Rates(multiply_adds=1.0, bytes=1.0, noise=1.0)


def test_ghost_norm_of_a_linear_layer_is_half_of_two_gram_matrices():
    # The Gram matrix of T=3 vectors of length 5 has 3·3·5 products, that of length 7 has 3·3·7; half of each.
    assert ghost_multiply_adds(Use("outer", 3, 5, 7)) == (45 + 63) / 2


def test_the_cheaper_way_to_a_norm_counts():
    # Formed: 35 floats written and read twice = 420 bytes a sample. Ghost at T=3: 54.
    assert extra_seconds(Use("outer", 3, 5, 7), 2, UNIT) == 2 * 54
    # At T=20 the ghost norm is ½·400·12 = 2400.
    assert extra_seconds(Use("outer", 20, 5, 7), 2, UNIT) == 2 * 420


def test_a_layer_holds_the_smaller_of_its_gradients_and_their_factors():
    assert held_bytes(Use("outer", 2, 5, 7, inputs=10), 4) == 4 * 4 * (10 + 14)
    assert held_bytes(Use("outer", 100, 5, 7, inputs=500), 4) == 4 * 4 * 35
    assert held_bytes(Use("rows", 3, 1000, 8), 4) == 4 * 4 * 24
    assert held_bytes(Use("values", 1, 1, 7), 4) == 4 * 4 * 7


def test_uses_of_two_linear_layers_of_one_input_and_a_frozen_one():
    class Model(nn.Layer):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4, bias_attr=False)
            self.frozen = nn.Linear(4, 3)
            for p in self.frozen.parameters():
                p.stop_gradient = True

        def forward(self, x):
            return self.frozen(self.left(x) + self.right(x))

    x = paddle.zeros([2, 5, 6])
    found = uses_of(Model(), lambda m: m(x).sum())
    assert sorted(found, key=str) == sorted(
        [
            Use("values", 1, 1, 4, trained=4),
            # 5·6 values of input, half to each of its two readers.
            Use("outer", 5, 6, 4, inputs=15.0, trained=24),
            Use("outer", 5, 6, 4, inputs=15.0, trained=24),
        ],
        key=str,
    )
    by_hand = 2 * (2 * 0.5 * 25 * (6 + 4) + 3 * 4 * 4) + 52
    assert floor_seconds(found, 2, UNIT) == by_hand
    held = 4 * 2 * (4 + 2 * min(24, 15 + 20))
    assert floor_bytes(found, 2, 67, forward_peak=0.0, early=False) == 4 * 67 + held
    assert floor_bytes(found, 2, 67, forward_peak=0.0, early=True) == 4 * 67
    assert floor_bytes(found, 2, 67, forward_peak=1e6, early=False) == 1e6


def test_uses_of_a_grouped_convolution():
    model = nn.Conv2D(4, 6, 3, stride=2, padding=1, groups=2, bias_attr=False)
    images = paddle.zeros([3, 4, 8, 8])
    found = uses_of(model, lambda m: m(images).sum())
    assert found == [Use("outer", 16, 2 * 9, 3, 2, inputs=256.0, trained=6 * 2 * 9)]


@pytest.mark.parametrize("name", ["encoder", "lora", "bitfit", "resnet20", "lstm", "embedding-1e5"])
def test_every_trained_value_of_a_row_is_counted_once(name):
    model, loss = QUICK[name].make()
    assert sum(use.trained for use in uses_of(model, loss)) == sum(
        p.size for p in model.parameters() if not p.stop_gradient
    )


def test_a_layer_that_cannot_be_counted_is_named():
    with pytest.raises(TypeError, match="PReLU"):
        uses_of(nn.PReLU(3), lambda m: m(paddle.ones([2, 3])).sum())
