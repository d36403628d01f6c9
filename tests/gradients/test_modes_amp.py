"""Loss scaling and low-precision activations.

Paddle's CPU build has no half-precision kernels and switches auto_cast and GradScaler off. So GradScaler is built under
a tracer that claims a GPU (its own arithmetic then runs on the CPU as it is), and auto_cast is imitated where it
matters: products of bfloat16 or float16 values whose result, and whose output gradient, have that dtype.
"""

from __future__ import annotations

import re
import warnings

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_privacy import DPSGD, DPAdamW, NoiseGenerator, PrivacyError, PrivacyWarning
from tests.oracle import clipped_sum, one_by_one


def exactly(message):
    return "^" + re.escape(message) + "$"


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    monkeypatch.setattr("paddle_privacy.optimizer.fused_update", lambda *args: False)
    paddle.seed(0)


def scaler(factor=1024.0, dynamic=False, **kwargs):
    class Place:
        def is_gpu_place(self):
            return True

    class Tracer:
        _expected_place = Place()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddle.amp.grad_scaler._dygraph_tracer", Tracer)
        made = paddle.amp.GradScaler(init_loss_scaling=factor, use_dynamic_loss_scaling=dynamic, **kwargs)
    assert made.is_enable()
    return made


@pytest.fixture
def float16(monkeypatch):
    """Inside auto_cast(dtype="float16"), as dynamic loss scaling wants it."""
    monkeypatch.setattr(paddle.amp.auto_cast.__globals__["amp_global_state"](), "amp_dtype", "float16")


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def losses(model, x):
    return (model(x) ** 2).sum(axis=1)


def build(model, optimizer_class=DPSGD, **kwargs):
    kwargs.setdefault("noise_multiplier", 0.0)
    kwargs.setdefault("clip_norm", 0.5)
    return optimizer_class(
        parameters=model.parameters(), learning_rate=0.1, batch_size=6, sampling="none",
        generator=NoiseGenerator.seeded(0), secure=False, **kwargs,
    )  # fmt: skip


def scaled_step(how, made, optimizer, loss):
    scaled = made.scale(loss)
    scaled.backward()
    if how == "unscale_":
        made.unscale_(optimizer)
    if how == "minimize":
        made.minimize(optimizer, scaled)
    elif how == "plain":
        optimizer.step()
    else:
        made.step(optimizer)
        made.update()


@pytest.mark.parametrize("how", ["step", "unscale_", "minimize", "plain"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_samples_are_clipped_at_their_true_size(how, reduction, dynamic, float16):
    model = network()
    x = paddle.randn([6, 3]) * paddle.to_tensor([[0.1], [0.1], [1.0], [1.0], [5.0], [5.0]])
    per_sample = one_by_one(model, losses, [x], model.parameters())
    norms = np.sqrt(sum((g.reshape(6, -1) ** 2).sum(1) for g in per_sample))
    assert (norms < 0.5).any() and (norms > 0.5).any()
    expected = clipped_sum(per_sample, 0.5)
    optimizer = build(model, loss_reduction=reduction)
    made = scaler(65536.0, dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        scaled_step(how, made, optimizer, getattr(losses(model, x), reduction)())
    np.testing.assert_allclose(optimizer.last_norms.numpy(), norms, rtol=1e-5)
    for parameter, total in zip(model.parameters(), expected):
        divisor = 6 if reduction == "mean" else 1
        np.testing.assert_allclose(parameter.grad.numpy(), total / divisor, rtol=1e-4, atol=1e-6)


def test_accumulated_backwards_may_have_different_factors():
    model = network()
    x = paddle.randn([6, 3])
    expected = clipped_sum(one_by_one(model, losses, [x], model.parameters()), 0.5)
    optimizer = build(model)
    for rows, factor in ((x[:3], 8.0), (x[3:], 4096.0)):
        scaler(factor).scale(losses(model, rows).mean()).backward()
    optimizer.step()
    for parameter, total in zip(model.parameters(), expected):
        np.testing.assert_allclose(parameter.grad.numpy(), total / 6, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer_class", [DPSGD, DPAdamW])
@pytest.mark.parametrize("overflowing", [[2], [0, 1, 2, 3, 4, 5]])
def test_overflow_leaves_samples_out_and_skips_neither_noise_nor_charge(optimizer_class, overflowing, float16):
    model = network()
    x = paddle.randn([6, 3])
    rest = [i for i in range(6) if i not in overflowing]
    expected = clipped_sum(one_by_one(model, losses, [x[rest]], model.parameters()), 0.5) if rest else None
    made = scaler(65536.0, dynamic=True)
    weights = paddle.ones([6])
    weights[overflowing] = 1e38
    noiseless = build(model)
    with pytest.warns(PrivacyWarning, match=f"^{len(overflowing)} sample\\(s\\) had a gradient that is not finite and"):
        scaled_step("step", made, noiseless, (losses(model, x) * weights).mean())
    for k, parameter in enumerate(model.parameters()):
        total = expected[k] if rest else np.zeros(parameter.shape)
        np.testing.assert_allclose(parameter.grad.numpy(), total / 6, rtol=1e-4, atol=1e-6)
    # The scaler learns nothing: neither is the step skipped nor the factor lowered.
    assert float(made._scale) == 65536.0 and not made._cache_found_inf

    noisy = build(model, optimizer_class, noise_multiplier=100.0)
    before = [p.numpy() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        scaled_step("step", made, noisy, (losses(model, x) * weights).mean())
    for value, parameter in zip(before, model.parameters()):
        assert (parameter.numpy() != value).all()
        # Noise of 100 · 0.5 / 6 in every coordinate: a standard deviation below 2 has a chance under 1e-9.
        assert np.abs(parameter.grad.numpy()).max() > 1.0
    assert noisy.accountant.history[0][1] == 1


def test_dynamic_factor_is_held_and_said(float16):
    model = network()
    optimizer = build(model)
    made = scaler(512.0, dynamic=True, incr_every_n_steps=2)
    with pytest.warns(PrivacyWarning, match=exactly(
        "dynamic loss scaling is held at 512: to change it when a sample overflows would release that without noise. "
        "Samples that overflow are left out and reported; if there are any, pass GradScaler a smaller "
        "init_loss_scaling (and use_dynamic_loss_scaling=False), or train in bfloat16"
    )):  # fmt: skip
        scaled_step("step", made, optimizer, losses(model, paddle.randn([6, 3])).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        for _ in range(5):
            scaled_step("step", made, optimizer, losses(model, paddle.randn([6, 3])).mean())
    assert float(made._scale) == 512.0


def test_static_factor_is_silent():
    model = network()
    optimizer = build(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        for _ in range(2):
            scaled_step("step", scaler(), optimizer, losses(model, paddle.randn([6, 3])).mean())


def test_scaler_without_its_scaled_loss_is_refused():
    message = exactly(
        "GradScaler.step() was called, but backward() did not run on what scaler.scale(loss) returned, so what the "
        "gradients were multiplied by is not known; call scaler.scale(loss).backward(), with nothing done to the "
        "scaled loss in between"
    )
    model = network()
    optimizer = build(model)
    before = [p.numpy() for p in model.parameters()]
    made = scaler()
    (made.scale(losses(model, paddle.randn([6, 3])).mean()) / 2).backward()
    with pytest.raises(PrivacyError, match=message):
        made.step(optimizer)
    for value, parameter in zip(before, model.parameters()):
        np.testing.assert_array_equal(parameter.numpy(), value)
    made.update()
    # Nothing is left of it: the next step is a plain one.
    losses(model, paddle.randn([6, 3])).mean().backward()
    optimizer.step()


def test_losses_scaled_differently_in_one_backward_are_refused():
    model = network()
    optimizer = build(model)
    two = [scaler(f).scale(losses(model, paddle.randn([6, 3])).mean()) for f in (2.0, 4.0)]
    paddle.autograd.backward(two)
    with pytest.raises(PrivacyError, match=exactly(
        "backward() got several losses that GradScaler scaled differently, so one factor cannot unscale their "
        "gradients; add the losses first and scale their sum"
    )):  # fmt: skip
        optimizer.step()


def test_disabled_scaler_changes_nothing():
    model = network()
    x = paddle.randn([6, 3])
    expected = clipped_sum(one_by_one(model, losses, [x], model.parameters()), 0.5)
    optimizer = build(model)
    scaled_step("step", paddle.amp.GradScaler(enable=False), optimizer, losses(model, x).mean())
    for parameter, total in zip(model.parameters(), expected):
        np.testing.assert_allclose(parameter.grad.numpy(), total / 6, rtol=1e-4, atol=1e-6)


# Low-precision activations, as auto_cast makes them


@pytest.fixture(params=["bfloat16", "float16"])
def low(request, monkeypatch):
    """nn.Linear in `low` precision: rounded inputs and weights, a result and an output gradient of that dtype."""

    def linear(x, weight, bias=None, name=None):
        rounded = [v.astype(request.param).astype("float32") for v in (x, weight)]
        y = paddle.matmul(*rounded) + (0 if bias is None else bias.astype("float32"))
        return y.astype(request.param)

    monkeypatch.setattr(F, "linear", linear)
    return request.param


@pytest.mark.parametrize("parameters", ["float32", "low"])
def test_low_precision_products_have_float32_norms_and_sums(low, parameters):
    model, wide = (nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)) for _ in range(2))
    if parameters == "low":
        model.to(dtype=low)
    wide.set_state_dict({name: value.astype("float32") for name, value in model.state_dict().items()})
    dtypes = []
    model[1].register_forward_post_hook(lambda layer, inputs, output: dtypes.append(output.dtype))

    def each(model, ids):
        return (model(ids).astype("float32") ** 2).sum(axis=[1, 2])

    ids = paddle.to_tensor([[1, 2, 2], [3, 4, 5], [8, 0, 1], [2, 2, 2]])
    per_sample = one_by_one(wide, each, [ids], wide.parameters())
    norms = np.sqrt(sum((g.reshape(4, -1) ** 2).sum(1) for g in per_sample))
    optimizer = build(model, clip_norm=float(np.median(norms)))
    each(model, ids).mean().backward()
    optimizer._capture.finish()
    assert set(map(str, dtypes)) == {f"paddle.{low}"}
    measured = optimizer._clipped_sum.norms
    assert measured.dtype == paddle.float32
    # The output gradients are rounded at every layer.
    rtol = {"bfloat16": 2e-2, "float16": 3e-3}[low]
    np.testing.assert_allclose(measured.numpy(), norms, rtol=rtol)
    expected = clipped_sum(per_sample, float(np.median(norms)))
    for total, wanted in zip(optimizer._clipped_sum.take(), expected):
        assert total.dtype == paddle.float32
        np.testing.assert_allclose(total.numpy(), wanted, rtol=0, atol=3 * rtol * np.abs(wanted).max())


def test_low_precision_sum_is_not_rounded_to_low(low):
    """Σᵢ of 500 equal samples would stop growing at 256 in bfloat16."""
    model = nn.Sequential(nn.Linear(1, 1, bias_attr=False))
    optimizer = build(model, clip_norm=1e6, loss_reduction="sum")
    model(paddle.ones([5000, 1])).astype("float32").sum().backward()
    optimizer.step()
    assert float(model[0].weight.grad) == 5000.0
