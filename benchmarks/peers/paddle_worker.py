"""One kind of step of one row in Paddle, for `step.py`: ``paddle_worker.py ROW plain|private``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from turns import resident_peak, take_turns

sys.path.append(str(Path(__file__).parents[1]))
from measure import stepper
from workloads import ROWS, Row, big_embedding

# Small enough for Opacus's hooks.
ROWS = {**ROWS, "embedding-1e4": Row(lambda: big_embedding(1024, rows=10_000), 1024)}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    row, kind = ROWS[sys.argv[1]], sys.argv[2]
    if kind == "private":
        import paddle_privacy  # noqa: F401
    imported = resident_peak()
    take_turns(stepper(row, kind), imported)
