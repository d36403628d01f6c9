"""One private run on several processes, over ``paddle.distributed``.

Nothing has to be asked for: an optimizer that is built where ``paddle.distributed`` is initialised with W > 1 processes
steps together with its twins on the other ranks. Each rank clips and adds its own samples and adds noise of σC/√W; one
all-reduce makes the sum, which then carries N(0, σ²C²) exactly. ``docs/distributed.md`` says what that protects.
"""

from __future__ import annotations

from paddle_privacy.distributed.ranks import Ranks, current_ranks
from paddle_privacy.distributed.step import SharedStep

__all__ = ["Ranks", "SharedStep", "current_ranks"]
