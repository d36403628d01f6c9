"""Audits of real training: gradient canaries through the optimizer, mislabelled rows through a model's losses."""

from __future__ import annotations

import json
import math

import numpy as np
import paddle
import pytest

from paddle_privacy import DPSGD, DPAdam, NoiseGenerator, PoissonBatchSampler
from paddle_privacy.audit import (
    ScoredRun,
    audit_mechanism,
    calibrated_scores,
    flip_coins,
    judge,
    logit_confidence,
    loss_threshold_scores,
    losses_and_probabilities,
    mislabel,
)
from paddle_privacy.audit.one_run import gaussian_epsilon

CANARIES, WIDTH, CLASSES, DELTA = 300, 40, 3, 1e-5


class TestGradientCanaries:
    """Confidence 1 - 1e-6, so that these tests raise a false alarm once in a million."""

    @pytest.mark.parametrize(
        "settings",
        [
            {"noise_multiplier": 1.0},
            {"noise_multiplier": 2.0, "steps": 9},
            {"noise_multiplier": 0.8, "steps": 15, "sample_rate": 0.3},
            {"noise_multiplier": 1.0, "steps": 4, "clip_norm": 0.01, "clipping": "automatic"},
            {"noise_multiplier": 1.0, "steps": 4, "optimizer_class": DPAdam},
        ],
    )
    def test_the_claim_stands(self, settings):
        result = audit_mechanism(seed=1, confidence=1 - 1e-6, **settings)
        assert not result.refuted
        assert result.epsilon < math.inf

    def test_the_attack_finds_much_of_the_mechanism(self):
        """One full-batch step at σ=0.5 is exactly 2-GDP, and one run cannot show all of it.

        Over 60 runs ε̂ was 5.05 ± 0.37; the limit lies four standard deviations below.
        """
        result = audit_mechanism(noise_multiplier=0.5, canaries=3000, seed=2)
        exact = gaussian_epsilon(2.0, DELTA)
        assert 0.35 * exact < result.best < exact <= result.epsilon
        assert result.best > 1.2 * result.lower_bound

    def test_without_noise_it_is_caught(self):
        result = audit_mechanism(noise_multiplier=0.0, seed=3)
        assert result.lower_bound > 2 and result.best > 5

    @pytest.mark.parametrize("factor", [0.0, 0.2])
    def test_an_implementation_that_adds_too_little_noise_is_refuted(self, monkeypatch, factor):
        """The optimizer claims σ, the noise arrives scaled by ``factor``."""
        real = NoiseGenerator.add_noise
        monkeypatch.setattr(NoiseGenerator, "add_noise", lambda self, sums, std: real(self, sums, std * factor))
        monkeypatch.setattr("paddle_privacy.optimizer.fused_update", lambda *arguments: False)
        result = audit_mechanism(noise_multiplier=1.5, canaries=2000, seed=4)
        assert result.refuted and result.best > result.epsilon

    def test_arguments(self):
        with pytest.raises(ValueError, match="steps"):
            audit_mechanism(noise_multiplier=1.0, steps=0)


class Rows(paddle.io.Dataset):
    def __init__(self, inputs, labels):
        self.inputs, self.labels = inputs, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, row):
        return self.inputs[row], self.labels[row]


@pytest.fixture(scope="module")
def world():
    """Canaries with wrong labels, and clean rows that teach the right ones."""
    generator = np.random.default_rng(7)
    centers = generator.normal(size=(CLASSES, WIDTH)) * 1.5

    def draw(count):
        labels = generator.integers(0, CLASSES, count)
        return (centers[labels] + generator.normal(size=(count, WIDTH))).astype(np.float32), labels

    clean, canaries = draw(400), draw(CANARIES)
    return clean, (canaries[0], mislabel(canaries[1], CLASSES, seed=8)), flip_coins(CANARIES, seed=9)


def train(world, private):
    (clean_x, clean_y), (canary_x, canary_y), coins = world
    x, y = np.concatenate([clean_x, canary_x[coins]]), np.concatenate([clean_y, canary_y[coins]])
    paddle.seed(1)
    model = paddle.nn.Sequential(paddle.nn.Linear(WIDTH, 64), paddle.nn.ReLU(), paddle.nn.Linear(64, CLASSES))
    rows = [(paddle.to_tensor(canary_x), paddle.to_tensor(canary_y))]
    reference, _ = losses_and_probabilities(model, rows)
    epsilon = math.inf
    if private:
        loader = paddle.io.DataLoader(Rows(x, y), batch_sampler=PoissonBatchSampler(Rows(x, y), batch_size=64))
        optimizer = DPSGD(
            parameters=model.parameters(),
            learning_rate=0.5,
            clip_norm=1.0,
            noise_multiplier=1.0,
            batch_size=64,
            data_loader=loader,
            target_delta=DELTA,
        )
        for _ in range(5):
            for inputs, labels in loader:
                paddle.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.clear_grad()
        epsilon = optimizer.get_privacy_spent().epsilon
    else:
        optimizer = paddle.optimizer.Adam(0.01, parameters=model.parameters())
        inputs, labels = paddle.to_tensor(x), paddle.to_tensor(y)
        for _ in range(150):
            paddle.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.clear_grad()
    model.train()
    losses, probabilities = losses_and_probabilities(model, rows)
    assert model.training
    assert losses == pytest.approx(-np.log(probabilities[np.arange(CANARIES), canary_y]), rel=1e-6)
    scores = {
        "loss threshold": loss_threshold_scores(losses),
        "calibrated": calibrated_scores(losses, reference),
        "confidence": logit_confidence(probabilities, canary_y),
    }
    return ScoredRun(scores, epsilon, DELTA, canary_y)


def test_a_model_trained_without_noise_is_caught(world):
    result = judge(train(world, private=False), world[2])
    assert result.lower_bound > 2, "memorised wrong labels must show"
    aucs = {attack.name: attack.auc for attack in result.attacks}
    assert aucs["loss threshold"] > 0.95 and aucs["confidence"] > 0.95
    assert aucs["calibrated"] > 0.9, "an untrained reference only adds noise"
    assert set(result.attacks[0].by_class) == {"0", "1", "2"}


def test_a_privately_trained_model_stays_below_its_epsilon(world):
    result = judge(train(world, private=True), world[2])
    assert result.best <= result.epsilon and not result.refuted
    assert all(attack.auc < 0.7 for attack in result.attacks)
    kept = json.loads(json.dumps(result.to_dict()))
    assert kept["refuted"] is False and len(kept["bounds"]) == 6


def test_the_confidence_is_shared_by_all_attacks():
    """Thirty useless attacks on one run, all scored at once: the largest ε̂ is still above 0 in at most 5% of runs."""
    generator = np.random.default_rng(10)
    alarms = 0
    for _ in range(100):
        coins = generator.random(200) < 0.5
        scores = {str(i): generator.normal(size=200) for i in range(10)}
        alarms += judge(ScoredRun(scores, 1.0, 0.0), coins).best > 0
    assert alarms <= 100 * 0.05 + 3.3 * math.sqrt(100 * 0.05 * 0.95)


def test_a_run_without_scores_is_refused():
    with pytest.raises(ValueError, match="scores"):
        judge(ScoredRun({}, 1.0, 1e-5), flip_coins(10))
