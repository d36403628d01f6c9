"""Optimizers other than DPSGD: the corrected Adam, any Paddle optimizer, and the calls that are not step()."""

from __future__ import annotations

import warnings

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_privacy import DPAdam, NoiseGenerator, dp_optimizer
from paddle_privacy.adam_bc import DPAdamBC
from paddle_privacy.errors import PrivacyError
from paddle_privacy.optimizer import PrivateOptimizer

X = np.random.RandomState(0).randn(8, 4).astype("float32")
PRIVACY = {"clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 8, "sampling": "none"}


def model_of() -> nn.Layer:
    paddle.seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def steps_of(model, optimizer, count: int = 5) -> list[np.ndarray]:
    for _ in range(count):
        (model(paddle.to_tensor(X)) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [p.numpy() for p in model.parameters()]


def test_without_noise_the_corrected_adam_is_adam():
    """Up to where epsilon stands: outside the root in Adam, a floor inside it here; both far below the moments."""
    weights = []
    for kind, extra in ((DPAdamBC, {"variance_floor": 1e-30}), (paddle.optimizer.Adam, {"epsilon": 1e-15})):
        model = model_of()
        private = {**PRIVACY, "noise_multiplier": 0.0, "clip_norm": 1e9} if kind is DPAdamBC else {}
        weights.append(steps_of(model, kind(0.01, parameters=model.parameters(), **extra, **private)))
    for a, b in zip(*weights):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_the_correction_against_the_formula():
    """Algorithm 1 of the paper, in float64, from the noisy gradients that the optimizer published."""
    model = model_of()
    optimizer = DPAdamBC(0.01, 0.8, 0.95, parameters=model.parameters(), variance_floor=2e-3, **PRIVACY)
    weights = [p.numpy().astype(np.float64) for p in model.parameters()]
    m = [np.zeros_like(w) for w in weights]
    v = [np.zeros_like(w) for w in weights]
    phi = (1.0 * 1.0 / 8) ** 2
    floored = 0
    for t in range(1, 7):
        (model(paddle.to_tensor(X)) ** 2).mean().backward()
        optimizer.step()
        for i, p in enumerate(model.parameters()):
            g = p.grad.numpy().astype(np.float64)
            m[i] = 0.8 * m[i] + 0.2 * g
            v[i] = 0.95 * v[i] + 0.05 * g * g
            second = v[i] / (1 - 0.95**t) - phi
            floored += int((second < 2e-3).sum())
            weights[i] -= 0.01 * m[i] / (1 - 0.8**t) / np.sqrt(np.maximum(second, 2e-3))
            np.testing.assert_allclose(p.numpy(), weights[i], rtol=1e-5, atol=1e-6)
            weights[i] = p.numpy().astype(np.float64)
        optimizer.clear_grad()
    assert floored > 0


def test_the_corrected_second_moment_is_that_of_the_signal():
    """Gradients that are zero: E[v̂] is the noise's variance, and what is left after the correction is near zero."""
    layer = nn.Linear(200, 50)
    optimizer = DPAdamBC(0.0, parameters=layer.parameters(), **PRIVACY)
    for _ in range(100):
        (layer(paddle.ones([8, 200])) * 0.0).mean().backward()
        optimizer.step()
    powers = optimizer._get_accumulator_master(optimizer._beta2_pow_acc_str, layer.weight)
    # After the last update the accumulator holds β^(t+1).
    v = optimizer._get_accumulator_master(optimizer._moment2_acc_str, layer.weight) / (1.0 - powers / 0.999)
    left = float((v - optimizer._noise_variance).mean()) / optimizer._noise_variance
    # Mean of 10^6 squared normals: standard deviation 1.4e-3, and the grid of the noise adds 1e-7.
    assert abs(left) < 8e-3


def test_its_state_continues(tmp_path):
    from paddle_privacy.checkpoint import load_checkpoint, save_checkpoint

    model = model_of()
    optimizer = DPAdamBC(0.01, parameters=model.parameters(), **PRIVACY)
    steps_of(model, optimizer)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    again = DPAdamBC(0.01, parameters=model.parameters(), **PRIVACY)
    load_checkpoint(tmp_path, model=model, optimizer=again)
    assert (again._noise_moment, again._updates) == (optimizer._noise_moment, 5)
    plain = DPAdam(0.01, parameters=model.parameters(), **PRIVACY)
    with pytest.raises(ValueError, match="dp_adam_bc"):
        again.set_state_dict(plain.state_dict())


def test_what_the_correction_does_not_fit_is_refused():
    model = model_of()
    with pytest.raises(ValueError, match="variance_floor"):
        DPAdamBC(0.01, parameters=model.parameters(), variance_floor=0.0, **PRIVACY)
    with pytest.raises(ValueError, match="amsgrad"):
        DPAdamBC(0.01, parameters=model.parameters(), amsgrad=True, **PRIVACY)


@pytest.mark.parametrize(
    "kind",
    [
        paddle.optimizer.Lamb,
        paddle.optimizer.RMSProp,
        paddle.optimizer.Adagrad,
        paddle.optimizer.Adadelta,
        paddle.optimizer.Adamax,
        paddle.optimizer.NAdam,
        paddle.optimizer.RAdam,
    ],
)
def test_any_paddle_optimizer_without_noise_is_itself(kind):
    extra = {"epsilon": 1e-6, "rho": 0.9} if kind is paddle.optimizer.RMSProp else {}
    weights = []
    for private in (True, False):
        model = model_of()
        made = dp_optimizer(kind) if private else kind
        arguments = {**PRIVACY, "noise_multiplier": 0.0, "clip_norm": 1e9} if private else {}
        optimizer = made(learning_rate=0.01, parameters=model.parameters(), **extra, **arguments)
        weights.append(steps_of(model, optimizer))
    for a, b in zip(*weights):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [paddle.optimizer.Lamb, paddle.optimizer.RMSProp, paddle.optimizer.Adagrad])
def test_any_paddle_optimizer_gets_the_noise(kind):
    model = model_of()
    extra = {"rho": 0.9} if kind is paddle.optimizer.RMSProp else {}
    arguments = {**PRIVACY, "generator": NoiseGenerator.seeded(3), "secure": False}
    optimizer = dp_optimizer(kind)(learning_rate=0.01, parameters=model.parameters(), **extra, **arguments)
    assert isinstance(optimizer, (PrivateOptimizer, kind))
    (model(paddle.to_tensor(X)) ** 2).mean().backward()
    optimizer.step()
    one = [p.numpy() for p in model.parameters()]
    model = model_of()
    optimizer = dp_optimizer(kind)(learning_rate=0.01, parameters=model.parameters(), **extra, **PRIVACY)
    (model(paddle.to_tensor(X)) ** 2).mean().backward()
    optimizer.step()
    assert all((a != b.numpy()).any() for a, b in zip(one, model.parameters()))


def test_what_is_no_optimizer_or_looks_at_the_data_again_is_refused():
    with pytest.raises(TypeError, match="LBFGS"):
        dp_optimizer(paddle.optimizer.LBFGS)
    with pytest.raises(TypeError, match="optimizer_class"):
        dp_optimizer(nn.Linear)


@pytest.mark.parametrize("kind", [paddle.optimizer.AdamW, paddle.optimizer.Momentum, "bc"])
def test_master_weights_hold_what_bfloat16_cannot(kind):
    """Updates far below bfloat16's resolution are lost without master weights and kept with them."""
    # An embedding: the one layer with weights for which Paddle has bfloat16 kernels on the CPU.
    model = nn.Embedding(6, 4)
    model.to(dtype="bfloat16")
    ids = paddle.to_tensor(np.arange(8).reshape(8, 1) % 6)
    made = DPAdamBC if kind == "bc" else dp_optimizer(kind)
    optimizer = made(learning_rate=1e-5, parameters=model.parameters(), multi_precision=True, **PRIVACY)
    before = model.weight.astype("float32").numpy()
    for _ in range(3):
        (model(ids).astype("float32") ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    master = optimizer._master_weights[model.weight.name]
    assert master.dtype == paddle.float32
    assert (master.numpy() != before).mean() > 0.9
    rounded = master.astype("bfloat16").astype("float32").numpy()
    np.testing.assert_array_equal(model.weight.astype("float32").numpy(), rounded)


def test_minimize_is_the_private_step_and_the_other_ways_are_closed():
    model = model_of()
    optimizer = dp_optimizer(paddle.optimizer.SGD)(0.1, parameters=model.parameters(), **PRIVACY)
    loss = (model(paddle.to_tensor(X)) ** 2).mean()
    loss.backward()
    optimizer.minimize(loss)
    assert optimizer.spending.steps == 1
    for call in (
        lambda: optimizer.apply_gradients([]),
        lambda: optimizer.backward(loss),
    ):
        with pytest.raises(PrivacyError):
            call()
    assert optimizer.spending.steps == 1


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
