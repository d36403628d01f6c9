"""What a worker of `step.py` does: steps when told to, and says how long each took and what memory all of them took."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def resident_peak() -> float:
    """MiB. Not getrusage: its maximum is inherited from the parent process."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def take_turns(step: Callable[[], None], imported: float) -> None:
    """One step to warm up, then one for every line read; at the end of input the memory above ``imported`` MiB."""
    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        start, start_processor = time.perf_counter(), time.process_time()
        step()
        took = {"wall": time.perf_counter() - start, "processor": time.process_time() - start_processor}
        print(json.dumps(took), flush=True)
    print(json.dumps({"resident": resident_peak() - imported}), flush=True)
