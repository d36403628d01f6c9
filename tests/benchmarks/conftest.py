"""The scripts in benchmarks/ import each other as neighbours."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
