"""Attacking one's own model: lower bounds on ε and membership-inference attacks, with intervals that hold.

The accountant proves an upper bound on ε; an audit measures a lower bound ε̂. ε̂ > ε means that a claim or its
implementation is wrong. ε̂ <= ε proves nothing, since a better attack may exist.
"""

from __future__ import annotations

from .many_runs import ScoreBound, score_bound
from .one_run import OneRunBound, one_run_bound

__all__ = ["OneRunBound", "ScoreBound", "one_run_bound", "score_bound"]
