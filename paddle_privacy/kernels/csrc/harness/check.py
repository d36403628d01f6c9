"""What can be known about the CUDA code on a machine without a GPU; run by ``make cuda-check``.

Compiles and links the kernels, reads their resources and refuses spills, runs the harness (which must either pass or
say that there is no GPU), loads it through ctypes, and builds the Paddle binding with CUDA switched on.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ.get("BUILD", "build/cuda")).resolve()


def main() -> int:
    sys.path.insert(0, str(HERE.parent.parent))
    build = importlib.import_module("build")  # the file beside csrc, without the package around it

    home = build.cuda_home()
    subprocess.run(["make", "-s", "-C", str(HERE), f"CUDA_HOME={home}", f"BUILD={BUILD}", "all"], check=True)
    release = subprocess.run([str(home / "bin" / "nvcc"), "--version"], capture_output=True, text=True, check=True)
    print("compiled and linked by", release.stdout.splitlines()[-2])
    spilling = print_resources((BUILD / "resources.txt").read_text())
    if spilling:
        print("spills in", ", ".join(sorted(spilling)))
        return 1

    done = subprocess.run([str(BUILD / "harness")], check=False)
    if done.returncode not in (0, 3):
        return 1
    library = ctypes.CDLL(str(BUILD / "libharness.so"))
    library.paddle_privacy_cuda_problem.restype = ctypes.c_char_p
    print("through ctypes:", library.paddle_privacy_cuda_problem().decode() or "a GPU is there")
    check_binding(build, home)
    return 0


def print_resources(text: str) -> set[str]:
    """A line a kernel and architecture; returns the kernels that spill."""
    spilling = set()
    name, target, spills = "", "", 0
    print(f"{'kernel':44} {'target':7} registers  shared  spilled bytes")
    for line in text.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            name, target = entry.groups()
            shown = subprocess.run(["c++filt", name], capture_output=True, text=True, check=False).stdout.strip()
            name = re.sub(r"\(paddle_privacy::Rule\)|paddle_privacy::|cuda::|^void |\((?!p).*", "", shown or name)
        elif stack := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(stack[1]) + int(stack[2])
        elif used := re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", line):
            print(f"{name[:44]:44} {target:7} {used[1]:>9} {used[2] or 0:>7} {spills:>14}")
            if spills:
                spilling.add(name)
    return spilling


def check_binding(build, home: Path) -> None:
    """The Paddle side compiles and links against CUDA; a CPU-only Paddle lacks the symbols to load it."""
    paddle = build.installed_paddle()
    target = BUILD / "paddle_privacy_ops.so"
    build.compile_library(target, "cuda", paddle)
    print(
        f"binding for Paddle {paddle.version} with CUDA: {target.stat().st_size >> 10} KiB, {build.id_in_file(target)}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
