"""kill -9 at random points: the ledger never knows of fewer updates than reached the weights file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

KILLS = 200


def test_the_ledger_never_under_reports(tmp_path):
    script = Path(__file__).with_name("crash_child.py")
    finished = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(KILLS), "20260101"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    outcomes = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(outcomes) == KILLS
    for kills in (outcomes[i : i + 10] for i in range(0, KILLS, 10)):
        begun = False
        for outcome in kills:
            assert outcome["steps"] >= outcome["updates"], outcome
            # Only until a ledger's first header is on disk may there be nothing to verify.
            assert "problem" not in outcome or (not begun and outcome["updates"] == 0), outcome
            begun = begun or "problem" not in outcome
        over = kills[-1]["steps"] - kills[-1]["updates"]
        assert over <= len(kills), "over-reported by at most the one interrupted step of each kill"
    assert sum(a["updates"] < b["updates"] for a, b in zip(outcomes, outcomes[1:])) > KILLS // 2, "kills fell too early"
