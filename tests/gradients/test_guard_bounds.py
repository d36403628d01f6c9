"""Ways in which one sample could be bounded twice over, or be several rows: each is refused or said."""

from __future__ import annotations

import warnings

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_privacy import DPSGD, PrivacyError, PrivacyWarning
from tests.gradients.guarded import _seeded, exactly, optimizer, step  # noqa: F401
from tests.oracle import one_by_one


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
