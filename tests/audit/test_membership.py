"""Attack scores and their metrics against closed forms and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from paddle_privacy.audit.canaries import flip_coins, mislabel, random_directions
from paddle_privacy.audit.membership import (
    calibrated_scores,
    evaluate_attack,
    likelihood_ratio_scores,
    logit_confidence,
    loss_threshold_scores,
)


def test_auc_is_the_rank_statistic_with_ties():
    generator = np.random.default_rng(0)
    scores = np.round(generator.normal(size=400), 1)
    included = generator.random(400) < 0.4
    assert evaluate_attack("a", scores, included).auc == pytest.approx(roc_auc_score(included, scores), abs=1e-12)


def test_operating_points_respect_the_false_positive_rate():
    generator = np.random.default_rng(1)
    included = np.arange(4000) % 2 == 0
    scores = generator.normal(size=4000) + 2.0 * included
    result = evaluate_attack("a", scores, included)
    for point in result.points:
        assert (scores[~included] > point.threshold).mean() <= point.false_positive_rate
        expected = stats.norm.sf(stats.norm.isf(point.false_positive_rate) - 2.0)
        assert point.interval[0] < point.true_positive_rate < point.interval[1]
        assert abs(point.true_positive_rate - expected) < 0.12
    assert result.advantage == pytest.approx(2 * stats.norm.cdf(1) - 1, abs=0.05)


def test_tied_scores_do_not_count_as_hits():
    result = evaluate_attack("a", np.zeros(100), np.arange(100) % 2 == 0)
    assert result.auc == 0.5
    assert all(point.true_positive_rate == 0 for point in result.points)
    assert result.advantage == 0


def test_by_class():
    generator = np.random.default_rng(2)
    classes = np.repeat([0, 1, 2], 400)
    included = generator.random(1200) < 0.5
    included[classes == 2] = True
    scores = generator.normal(size=1200) + 5 * included * (classes == 1)
    result = evaluate_attack("a", scores, included, classes=classes)
    assert set(result.by_class) == {"0", "1"}, "a class without non-members has no curve"
    assert result.by_class["1"].auc > 0.99 and abs(result.by_class["0"].auc - 0.5) < 0.1
    assert result.to_dict()["by_class"]["1"]["auc"] == result.by_class["1"].auc


def test_logit_confidence():
    probabilities = np.array([[0.2, 0.8], [1.0, 0.0]])
    phi = logit_confidence(probabilities, [1, 0])
    assert phi[0] == pytest.approx(math.log(0.8 / 0.2))
    assert np.isfinite(phi).all() and phi[1] > 100


def test_calibration_removes_what_is_easy_for_everyone():
    generator = np.random.default_rng(3)
    hardness, included = generator.exponential(3.0, 2000), generator.random(2000) < 0.5
    losses = hardness - 0.5 * included + 0.1 * generator.normal(size=2000)
    plain = evaluate_attack("loss", loss_threshold_scores(losses), included).auc
    calibrated = evaluate_attack("calibrated", calibrated_scores(losses, hardness), included).auc
    assert plain < 0.65 and calibrated > 0.99


class TestLikelihoodRatio:
    def world(self, rows=1500, k=16, shift=1.0):
        """Logits N(hardness + shift·member, 1): the exact likelihood ratio is known."""
        generator = np.random.default_rng(4)
        hardness, included = generator.normal(0, 5, rows), generator.random(rows) < 0.5
        target = hardness + shift * included + generator.normal(size=rows)
        inside = generator.random((k, rows)) < 0.5
        shadow = hardness + shift * inside + generator.normal(size=(k, rows))
        return target, included, shadow, inside

    def test_online_approaches_the_optimal_test(self):
        target, included, shadow, inside = self.world()
        auc = evaluate_attack("lira", likelihood_ratio_scores(target, shadow, inside), included).auc
        best = stats.norm.cdf(1 / math.sqrt(2))
        assert best - 0.06 < auc < best + 0.03

    def test_offline(self):
        target, included, shadow, inside = self.world()
        shadow = shadow - 1.0 * inside
        auc = evaluate_attack("lira", likelihood_ratio_scores(target, shadow, np.zeros_like(inside)), included).auc
        assert auc > 0.7

    def test_rows_without_an_outside_model_are_left_out(self):
        target, included, shadow, inside = self.world()
        inside[:, 0] = True
        scores = likelihood_ratio_scores(target, shadow, inside)
        assert np.isnan(scores[0]) and np.isfinite(scores[1:]).all()
        result = evaluate_attack("lira", scores, included)
        assert result.members + result.nonmembers == len(target) - 1


def test_canaries():
    coins = flip_coins(20000, seed=5)
    assert abs(coins.mean() - 0.5) < 0.02 and coins.dtype == bool
    assert not np.array_equal(flip_coins(64), flip_coins(64))
    labels = np.arange(1000) % 3
    moved = mislabel(labels, 3)
    assert (moved != labels).all() and set(moved) == {0, 1, 2} and moved.dtype == labels.dtype
    parts = random_directions(50, [(30, 20), (7,)], norm=2.5)
    flat = np.concatenate([part.reshape(50, -1) for part in parts], axis=1)
    assert np.linalg.norm(flat, axis=1) == pytest.approx(2.5, rel=1e-5)
    gram = flat @ flat.T / 2.5**2
    assert np.abs(gram - np.eye(50)).max() < 0.25


def test_refusals():
    with pytest.raises(ValueError, match="members and non-members"):
        evaluate_attack("a", np.zeros(5), np.ones(5, dtype=bool))
    with pytest.raises(ValueError, match="boolean"):
        evaluate_attack("a", np.zeros(5), np.ones(5))
    with pytest.raises(ValueError, match="shadow"):
        likelihood_ratio_scores(np.zeros(5), np.zeros((2, 4)), np.zeros((2, 4), dtype=bool))
    with pytest.raises(ValueError, match="classes"):
        mislabel([0, 0], 1)
    with pytest.raises(ValueError, match="norm"):
        random_directions(2, [(3,)], 0.0)
