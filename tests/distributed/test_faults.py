"""A rank that is killed or stalls: the others end in time, nothing is spent unrecorded, and any number resumes.

Twenty rounds and eight with sharded optimizer states, on one ledger and one checkpoint; each kills a rank at another
point of a step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_privacy.accounting import compute_epsilon

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("faults.py")


def start(folder: Path, *words: str) -> subprocess.Popen:
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), *words],
        env=surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rounds_of(folder: Path, process: subprocess.Popen) -> list[dict]:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    stalled, killed = tmp_path_factory.mktemp("stalled"), tmp_path_factory.mktemp("killed")
    # gloo waits 30 seconds for a rank that is silent; meanwhile the others are killed.
    waiting = start(stalled, "stall")
    return {"killed": rounds_of(killed, start(killed)), "stalled": rounds_of(stalled, waiting)}


def test_the_survivors_end_by_themselves_with_an_error_that_says_what_to_do(outcomes):
    assert [found["stage"] > 0 for found in outcomes["killed"]] == [False] * 20 + [True] * 8
    for found in outcomes["killed"] + outcomes["stalled"]:
        codes = dict(enumerate(found["codes"]))
        assert codes.pop(found["victim"]) == -9, found
        assert set(codes.values()) == {0}, found
        assert len(found["survivors"]) == found["world"] - 1
        for survivor in found["survivors"].values():
            assert "lost contact with the other ranks" in survivor["error"]
            assert "restart all ranks from the last checkpoint" in survivor["error"]


def test_the_survivors_agree_on_every_update_that_was_made(outcomes):
    for found in outcomes["killed"]:
        histories = [survivor["updates"] for survivor in found["survivors"].values()]
        shortest = min(map(len, histories))
        # New values that a dead owner made and did not send are nobody's.
        assert shortest >= found["at"] - (found["stage"] > 0 and found["point"] in ("updated", "between"))
        assert all(history[:shortest] == histories[0][:shortest] for history in histories)


def test_a_step_that_fails_leaves_the_weights_as_they_were(outcomes):
    for found in outcomes["killed"] + outcomes["stalled"]:
        for survivor in found["survivors"].values():
            before = survivor["updates"][-1][1] if survivor["updates"] else survivor["weights at start"]
            assert survivor["weights at error"] == before, found


def test_sharded_states_of_which_a_part_is_lost_are_not_saved(outcomes):
    for found in outcomes["killed"]:
        if found["stage"]:
            assert all("restart all ranks" in survivor["saves after"] for survivor in found["survivors"].values())


def test_no_update_is_without_its_record_and_none_is_recorded_twice(outcomes):
    before = 0
    for found in outcomes["killed"]:
        updates = max(len(survivor["updates"]) for survivor in found["survivors"].values())
        # The victim made so many before it died; a record may have no update.
        made = max(updates, found["at"])
        assert made <= found["recorded"] - before <= made + 1, found
        before = found["recorded"]


def test_every_restart_continues_the_epsilon_of_the_ledger_whatever_the_number_of_ranks(outcomes):
    recorded, worlds = 0, set()
    for found in outcomes["killed"]:
        epsilon = 0.0
        if recorded:
            epsilon = compute_epsilon(
                noise_multiplier=1.0, sample_rate=0.1, steps=recorded, delta=1e-5, accountant="rdp"
            )
        for survivor in found["survivors"].values():
            assert survivor["epsilon at start"] == pytest.approx(epsilon, rel=1e-9)
        recorded = found["recorded"]
        worlds.add(found["world"])
    assert worlds == {2, 3}


def test_a_silent_rank_holds_the_others_no_longer_than_gloo_waits(outcomes):
    (found,) = outcomes["stalled"]
    assert 0 not in [code for rank, code in enumerate(found["codes"]) if rank == found["victim"]]
    assert "TIMEOUT" in found["survivors"]["0"]["error"].upper()
