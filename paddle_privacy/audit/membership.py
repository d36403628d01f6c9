"""Membership-inference scores, and how well they tell training rows from others.

Every score is larger for rows that look trained on. The scores are plain arithmetic on losses or confidences, so
they serve any model; :mod:`paddle_privacy.audit.model_scores` computes those from a Paddle model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .intervals import auc_interval, check_error, lower_limit, upper_limit

LOW_FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.1)


def loss_threshold_scores(losses: ArrayLike) -> np.ndarray:
    """A small loss suggests a training row (Yeom et al. 2018)."""
    return -np.asarray(losses, dtype=np.float64)


def calibrated_scores(losses: ArrayLike, reference_losses: ArrayLike) -> np.ndarray:
    """A loss below what a model that never saw the row has (Watson et al. 2022).

    ``reference_losses`` come from the public model that training started from, so no shadow model is needed.
    """
    return np.asarray(reference_losses, dtype=np.float64) - np.asarray(losses, dtype=np.float64)


def logit_confidence(probabilities: ArrayLike, labels: ArrayLike) -> np.ndarray:
    """φ = log(p_y / (1 - p_y)) per row, near-normal over shadow models (Carlini et al. 2022, Section V).

    Args:
        probabilities: [rows, classes], each row summing to one.
        labels: [rows] true classes.
    """
    p = np.asarray(probabilities, dtype=np.float64)
    y = np.asarray(labels).reshape(-1)
    rows = np.arange(len(y))
    true = p[rows, y]
    rest = p.copy()
    rest[rows, y] = 0.0
    tiny = np.finfo(np.float64).tiny
    return np.log(np.maximum(true, tiny)) - np.log(np.maximum(rest.sum(axis=1), tiny))


def likelihood_ratio_scores(target: ArrayLike, shadow: ArrayLike, shadow_included: ArrayLike) -> np.ndarray:
    """LiRA with k shadow models (Carlini et al. 2022, Algorithm 1; offline where a row was in no shadow model).

    Args:
        target: [rows] :func:`logit_confidence` of the audited model.
        shadow: [k, rows] the same of each shadow model.
        shadow_included: [k, rows] bool, whether shadow model i was trained on row j.

    Standard deviations are pooled over rows, which is what Carlini et al. advise below 64 shadow models.
    A row that no shadow model left out cannot be scored and gets NaN.
    """
    phi = np.asarray(target, dtype=np.float64)
    values = np.asarray(shadow, dtype=np.float64)
    inside = np.asarray(shadow_included)
    if values.ndim != 2 or values.shape[1:] != phi.shape or inside.shape != values.shape:
        raise ValueError(
            f"shadow and shadow_included must be [k, {len(phi)}] like target, got {values.shape} and {inside.shape}"
        )
    if inside.dtype != np.bool_:
        raise TypeError(f"shadow_included must be boolean, got {inside.dtype}")
    mean_out, spread_out, seen_out = _per_row(values, ~inside)
    mean_in, spread_in, seen_in = _per_row(values, inside)
    out = _log_normal(phi, mean_out, spread_out)
    # Offline: how far beyond the models without the row; online: ratio of the two likelihoods.
    score = np.where(seen_in > 0, _log_normal(phi, mean_in, spread_in) - out, (phi - mean_out) / spread_out)
    return np.where(seen_out > 0, score, np.nan)


def _per_row(values: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """Mean over the chosen models per row, pooled standard deviation, number of models per row."""
    seen = chosen.sum(axis=0)
    total = np.where(chosen, values, 0.0).sum(axis=0)
    mean = np.divide(total, seen, out=np.zeros_like(total), where=seen > 0)
    residual = np.where(chosen, values - mean, 0.0)
    freedom = int(np.maximum(seen - 1, 0).sum())
    variance = float((residual**2).sum() / freedom) if freedom else 1.0
    return mean, math.sqrt(max(variance, 1e-12)), seen


def _log_normal(x: np.ndarray, mean: np.ndarray, spread: float) -> np.ndarray:
    return -0.5 * ((x - mean) / spread) ** 2 - math.log(spread)


@dataclass(frozen=True)
class RatePoint:
    """One operating point of an attack."""

    false_positive_rate: float
    """The rate asked for."""
    true_positive_rate: float
    """Observed among members."""
    interval: tuple[float, float]
    """Clopper–Pearson interval of the true positive rate at this threshold."""
    threshold: float


@dataclass(frozen=True)
class AttackResult:
    """How well one attack tells members from non-members."""

    name: str
    members: int
    nonmembers: int
    auc: float
    auc_interval: tuple[float, float]
    points: tuple[RatePoint, ...]
    advantage: float
    """max over thresholds of TPR - FPR, a point estimate that is above zero also without a leak."""
    confidence: float
    by_class: dict[str, AttackResult]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "name": self.name,
            "members": self.members,
            "nonmembers": self.nonmembers,
            "auc": self.auc,
            "auc_interval": list(self.auc_interval),
            "advantage": self.advantage,
            "confidence": self.confidence,
            "points": [
                {
                    "false_positive_rate": point.false_positive_rate,
                    "true_positive_rate": point.true_positive_rate,
                    "interval": list(point.interval),
                }
                for point in self.points
            ],
            "by_class": {name: result.to_dict() for name, result in self.by_class.items()},
        }


def evaluate_attack(
    name: str,
    scores: ArrayLike,
    included: ArrayLike,
    classes: ArrayLike | None = None,
    confidence: float = 0.95,
    false_positive_rates: Sequence[float] = LOW_FALSE_POSITIVE_RATES,
) -> AttackResult:
    """AUC and true positive rates at low false positive rates, overall and by class.

    Args:
        name: of the attack.
        scores: [rows] larger means "was trained on"; rows with NaN are left out.
        included: [rows] bool.
        classes: [rows] a label per row; classes without a member or a non-member are left out.
        confidence: of each interval by itself.
        false_positive_rates: thresholds are set on the non-members so that at most this share lies above.

    These describe one model's rows, which are not independent; they rank attacks and models. A lower bound on ε that
    holds comes from :func:`paddle_privacy.audit.one_run_bound`.
    """
    values, inside = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if inside.dtype != np.bool_ or inside.shape != values.shape or values.ndim != 1:
        raise ValueError(f"included must be a boolean vector like scores, got {inside.dtype} {inside.shape}")
    check_error("confidence", confidence)
    scored = ~np.isnan(values)
    result = _evaluate(name, values[scored], inside[scored], confidence, false_positive_rates, {})
    if classes is None:
        return result
    labels = np.asarray(classes)[scored]
    parts: dict[str, AttackResult] = {}
    for label in np.unique(labels):
        rows = labels == label
        flags = inside[scored][rows]
        if flags.any() and not flags.all():
            parts[str(label)] = _evaluate(
                f"{name}, class {label}", values[scored][rows], flags, confidence, false_positive_rates, {}
            )
    return _evaluate(name, values[scored], inside[scored], confidence, false_positive_rates, parts)


def _evaluate(
    name: str,
    values: np.ndarray,
    inside: np.ndarray,
    confidence: float,
    rates: Sequence[float],
    by_class: dict[str, AttackResult],
) -> AttackResult:
    members, others = np.sort(values[inside]), np.sort(values[~inside])
    if not len(members) or not len(others):
        raise ValueError(f"included must name members and non-members, got {len(members)} and {len(others)}")
    error = 1 - confidence
    below = np.searchsorted(others, members, side="left")
    tied = np.searchsorted(others, members, side="right") - below
    auc = float((below + 0.5 * tied).sum() / (len(members) * len(others)))
    points = []
    for rate in rates:
        allowed = int(rate * len(others))
        threshold = float(others[len(others) - 1 - allowed])
        hits = int((members > threshold).sum())
        interval = (lower_limit(hits, len(members), error / 2), upper_limit(hits, len(members), error / 2))
        points.append(RatePoint(rate, hits / len(members), interval, threshold))
    thresholds = np.concatenate([others, members])
    tpr = 1 - np.searchsorted(members, thresholds, side="right") / len(members)
    fpr = 1 - np.searchsorted(others, thresholds, side="right") / len(others)
    return AttackResult(
        name,
        len(members),
        len(others),
        auc,
        auc_interval(auc, len(members), len(others), error),
        tuple(points),
        float(max(0.0, np.max(tpr - fpr))),
        confidence,
        by_class,
    )
