"""The noise that reaches the weights: right scale, right shape, never the same twice.

Each statistical test states its false-alarm rate; with fresh keys every run is a new experiment.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn
from scipy import stats

import paddle_privacy as pp

SIGMA, CLIP, BATCH = 1.7, 0.6, 32


def noisy_steps(steps: int, *, optimizer_options=None, used: bool = True) -> list[dict[str, np.ndarray]]:
    """Each parameter's update over `steps` steps in which every sample's gradient is zero: pure noise."""
    net = nn.Sequential(nn.Embedding(50, 40), nn.Flatten(), nn.Linear(200, 30), nn.LayerNorm(30), nn.Linear(30, 20))
    extra = nn.Linear(60, 40)
    named = {**dict(net.named_parameters()), **{f"unused.{k}": v for k, v in extra.named_parameters()}}
    optimizer = pp.DPSGD(
        learning_rate=1.0,
        parameters=list(named.values()),
        clip_norm=CLIP,
        noise_multiplier=SIGMA,
        batch_size=BATCH,
        sampling="none",
        **(optimizer_options or {}),
    )
    ids = paddle.randint(0, 50, [4, 5])
    updates = []
    for _ in range(steps):
        before = {name: p.numpy().astype("float64") for name, p in named.items()}
        (net(ids) * 0.0).sum(axis=1).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        updates.append({name: before[name] - p.numpy() for name, p in named.items()})
    return updates


def test_scale_shape_and_independence_of_every_parameter():
    """For 10 parameters x 2 steps: KS at 1e-6 each, and correlation between steps beyond 5.5 standard errors:
    false-alarm rate below 1e-4 a run."""
    first, second = noisy_steps(2)
    expected = SIGMA * CLIP / BATCH
    for name in first:
        for step in (first, second):
            values = step[name].ravel()
            assert stats.kstest(values / expected, "norm").pvalue > 1e-6, name
        correlation = np.mean(first[name] * second[name]) / expected**2
        assert abs(correlation) < 5.5 / np.sqrt(first[name].size), name
        assert not np.array_equal(first[name], second[name]), name
    pooled = np.concatenate([u.ravel() for u in (*first.values(), *second.values())]) / expected
    # χ² and mean at 5.5 standard errors: 8e-8 in all.
    assert abs(np.mean(pooled**2) - 1) < 5.5 * np.sqrt(2 / pooled.size)
    assert abs(np.mean(pooled)) < 5.5 / np.sqrt(pooled.size)


def test_parameters_of_equal_shape_get_different_noise():
    update = noisy_steps(1)[0]
    flat = [u.ravel()[:20] for u in update.values() if u.size >= 20]
    for i in range(len(flat)):
        for j in range(i):
            assert not np.array_equal(flat[i], flat[j])


def test_runs_differ_unless_seeded():
    def seeded() -> np.ndarray:
        options = {"generator": pp.NoiseGenerator.seeded(5), "secure": False}
        return noisy_steps(1, optimizer_options=options)[0]["2.weight"]

    np.testing.assert_allclose(seeded(), seeded(), atol=1e-6)
    assert not np.allclose(noisy_steps(1)[0]["2.weight"], noisy_steps(1)[0]["2.weight"], atol=1e-6)


def test_paddle_seed_does_not_move_the_noise():
    paddle.seed(7)
    one = noisy_steps(1)[0]["2.weight"]
    paddle.seed(7)
    two = noisy_steps(1)[0]["2.weight"]
    assert not np.allclose(one, two, atol=1e-6)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic", "psac", "adaptive"])
def test_noise_follows_the_sensitivity_of_the_clipping(clipping):
    """χ² of the pooled noise at 5.5 standard errors: 4e-8 a case."""
    update = noisy_steps(1, optimizer_options={"clipping": clipping})[0]
    pooled = np.concatenate([u.ravel() for u in update.values()]) / (SIGMA * CLIP / BATCH)
    assert abs(np.mean(pooled**2) - 1) < 5.5 * np.sqrt(2 / pooled.size)


def test_low_precision_parameters_get_noise_too():
    # An embedding: Paddle's CPU kernels have no bfloat16 matmul.
    net = nn.Embedding(300, 100).to(dtype="bfloat16")
    net.weight.set_value(paddle.zeros_like(net.weight))
    optimizer = pp.DPSGD(
        learning_rate=1.0,
        parameters=net.parameters(),
        clip_norm=1.0,
        noise_multiplier=64.0,
        batch_size=1,
        sampling="none",
    )
    (net(paddle.zeros([2, 3], "int64")).astype("float32") * 0).sum(axis=[1, 2]).mean().backward()
    optimizer.step()
    values = net.weight.astype("float32").numpy().ravel() / 64.0
    # bfloat16 keeps 8 bits, which moves the variance by less than 1e-5; 5.5 standard errors.
    assert abs(np.mean(values**2) - 1) < 5.5 * np.sqrt(2 / values.size)
