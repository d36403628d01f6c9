"""One run of worker.py on 1, 2, 3 and 4 processes, for all tests that look at what the ranks found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Two ranks first: they save what the others resume.
WORLDS = (2, 1, 3, 4)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    words = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("worker.py")), str(folder)]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*words, *map(str, WORLDS)], env=surroundings, capture_output=True, text=True, timeout=1000)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="session")
def ranks(folder):
    """What each rank found, by the number of ranks."""
    return {w: [json.loads((folder / f"{w}/rank{r}.json").read_text()) for r in range(w)] for w in WORLDS}
