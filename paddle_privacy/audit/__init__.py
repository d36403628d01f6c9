"""Attacking one's own model: lower bounds on ε and membership-inference attacks, with intervals that hold.

The accountant proves an upper bound on ε; an audit measures a lower bound ε̂. ε̂ > ε means that a claim or its
implementation is wrong. ε̂ <= ε proves nothing, since a better attack may exist.
"""

from __future__ import annotations

from .canaries import flip_coins, mislabel, random_directions
from .many_runs import ScoreBound, score_bound
from .mechanism import audit_mechanism
from .membership import (
    AttackResult,
    calibrated_scores,
    evaluate_attack,
    likelihood_ratio_scores,
    logit_confidence,
    loss_threshold_scores,
)
from .model_scores import losses_and_probabilities
from .one_run import OneRunBound, one_run_bound
from .result import AuditResult, ScoredRun, judge

__all__ = [
    "AttackResult",
    "AuditResult",
    "OneRunBound",
    "ScoreBound",
    "ScoredRun",
    "audit_mechanism",
    "calibrated_scores",
    "evaluate_attack",
    "flip_coins",
    "judge",
    "likelihood_ratio_scores",
    "logit_confidence",
    "loss_threshold_scores",
    "losses_and_probabilities",
    "mislabel",
    "one_run_bound",
    "random_directions",
    "score_bound",
]
