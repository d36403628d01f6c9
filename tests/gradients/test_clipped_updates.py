"""From backward() to the weights: the clipped update of models whose parameters are captured in unusual ways."""

from __future__ import annotations

import gc

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_privacy import DPSGD
from paddle_privacy.gradients.tap import Call
from tests.gradients.parity import built, projected_loss, randomise, tensor
from tests.gradients.test_bare_parameters import CASES, POSITIONS, TIED, B, Bare, D, Positions, TiedModel, TinyViT
from tests.gradients.test_recurrent import Sequence
from tests.oracle import clipped_sum, one_by_one


def floats(*shape: int):
    return tensor(np.random.default_rng(1).standard_normal([B, *shape]), "float64")


def ids():
    return paddle.to_tensor(np.random.default_rng(0).integers(0, 7, [B, 6]))


MODELS = {
    "tied-head": (lambda: TiedModel(TIED["T"]), ids),
    "vit": (lambda: TinyViT(0.0), lambda: floats(3, 8, 8)),
    "lstm": (lambda: Sequence(nn.LSTM(4, 6, num_layers=2)), lambda: floats(5, 4)),
    "shared-positions": (lambda: Positions(POSITIONS["added"][0]), ids),
    "shared-positions-by-rows": (lambda: Positions(POSITIONS["unsqueezed"][0]), ids),
    "all-ways-at-once": (lambda: Bare(*CASES["all-ways-at-once"][:2]), lambda: floats(3, D)),
}


@pytest.mark.filterwarnings("ignore::paddle_privacy.PrivacyWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_update_is_the_clipped_sum(name):
    build, inputs = MODELS[name]
    model, loss_fn = randomise(built(build, "float64")), projected_loss()
    start = [p.numpy() for p in model.parameters()]
    batches = [inputs(), inputs()[: B - 1]]
    per_sample = [one_by_one(model, loss_fn, [x], model.parameters()) for x in batches]
    norms = np.sqrt(sum((g.reshape(B, -1) ** 2).sum(axis=1) for g in per_sample[0]))
    bound = float(np.median(norms))
    optimizer = DPSGD(
        parameters=model,
        learning_rate=1.0,
        clip_norm=bound,
        noise_multiplier=0.0,
        batch_size=10,
        loss_reduction="sum",
        sampling="none",
    )
    for x in batches:
        loss_fn(model, x).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(optimizer.last_norms.numpy()[:B], norms, rtol=1e-9)
    sums = [clipped_sum(grads, bound) for grads in per_sample]
    for p, before, first, second in zip(model.parameters(), start, *sums):
        np.testing.assert_allclose(p.numpy(), before - first - second, rtol=1e-9, atol=1e-12)


def test_frozen_parts_and_biases_keep_no_activations():
    def kept(train) -> tuple[int, int]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        for name, p in model.named_parameters():
            p.stop_gradient = not train(name)
        optimizer = DPSGD(parameters=model, learning_rate=0.1, clip_norm=1.0, noise_multiplier=1.0, batch_size=2)
        gc.collect()
        before = {id(x) for x in gc.get_objects() if type(x) is Call}
        out = model(paddle.randn([2, 4]))
        calls = [x for x in gc.get_objects() if type(x) is Call and id(x) not in before]
        assert out is not None and optimizer is not None
        return len(calls), sum(len(call.inputs) for call in calls)

    assert kept(lambda name: True) == (4, 4)
    assert kept(lambda name: name.startswith("3")) == (1, 1)
    assert kept(lambda name: name.endswith("bias")) == (4, 0)
