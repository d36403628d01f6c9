"""From the scores of one audited run to lower bounds on ε, attack metrics, and a verdict on the claim."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .membership import AttackResult, evaluate_attack
from .one_run import OneRunBound, one_run_bound

CURVES = ("dp", "gaussian")


@dataclass
class ScoredRun:
    """What an audited training run hands back.

    Attributes:
        scores: name of an attack -> [canaries], larger means "was trained on".
        epsilon, delta: what the run claims; ε may be ``math.inf``.
        classes: [canaries] labels, for metrics by class.
    """

    scores: dict[str, np.ndarray]
    epsilon: float
    delta: float
    classes: np.ndarray | None = None


@dataclass
class AuditResult:
    """Lower bounds against the claim."""

    epsilon: float
    delta: float
    confidence: float
    """Chance that *all* bounds together are below the true ε."""
    bounds: dict[str, OneRunBound]
    attacks: list[AttackResult]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def lower_bound(self) -> float:
        """The largest ε̂ that speaks about (ε, δ)-DP itself."""
        return max((bound.epsilon for bound in self.bounds.values() if bound.curve == "dp"), default=0.0)

    @property
    def best(self) -> float:
        """The largest ε̂ of all."""
        return max((bound.epsilon for bound in self.bounds.values()), default=0.0)

    @property
    def refuted(self) -> bool:
        """Whether the claim is false: some ε̂ is above it."""
        return self.best > self.epsilon

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what ``report`` reads."""
        return {
            "format": "paddle_privacy.audit/1",
            "epsilon": "inf" if math.isinf(self.epsilon) else self.epsilon,
            "delta": self.delta,
            "confidence": self.confidence,
            "refuted": self.refuted,
            "settings": self.settings,
            "bounds": [
                {
                    "name": name,
                    "epsilon": bound.epsilon,
                    "curve": bound.curve,
                    "confidence": self.confidence,
                    "canaries": bound.canaries,
                    "guessed_in": bound.guessed_in,
                    "guessed_out": bound.guessed_out,
                    "correct": bound.correct,
                }
                for name, bound in self.bounds.items()
            ],
            "attacks": [attack.to_dict() for attack in self.attacks],
        }


def judge(run: ScoredRun, coins: np.ndarray, confidence: float = 0.95, **settings: Any) -> AuditResult:
    """Bounds and metrics of a run whose canaries were put in by ``coins``.

    Args:
        run: the scores and the claim.
        coins: [canaries] bool, fair and independent, made by :func:`paddle_privacy.audit.flip_coins`.
        confidence: shared by all attacks and curves (Bonferroni), so that the largest ε̂ may be reported.
        settings: kept in the result.
    """
    if not run.scores:
        raise ValueError("scores is empty; an audited run must score its canaries by at least one attack")
    each = 1 - (1 - confidence) / (len(run.scores) * len(CURVES))
    bounds = {}
    for name, scores in run.scores.items():
        for curve, label in zip(CURVES, ("(ε, δ)-DP", "Gaussian DP")):
            bounds[f"{name}, {label}"] = one_run_bound(scores, coins, run.delta, each, curve=curve)  # type: ignore[arg-type]
    attacks = [evaluate_attack(name, scores, coins, run.classes, confidence) for name, scores in run.scores.items()]
    return AuditResult(run.epsilon, run.delta, confidence, bounds, attacks, dict(settings))
