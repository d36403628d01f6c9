"""What this installation consists of and which code does its arithmetic: the content of ``paddle-privacy info``."""

from __future__ import annotations

import os
import platform
import sys

import numpy as np
import paddle

from .kernels import build, native
from .version import __version__


def installation() -> list[tuple[str, str]]:
    """Rows ``(name, value)`` for people and bug reports; loads the native operators, and builds them if needed."""
    state = native.state()
    if state.device is None:
        operators = f"reference path (numpy and Paddle operators): {state.reason}"
    else:
        tensors = "CPU and CUDA tensors" if state.device == "cuda" else "CPU tensors"
        operators = f"native for {tensors}: {state.reason}"
    rows = [
        ("paddle-privacy", __version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("Paddle", f"{paddle.__version__} ({'with' if paddle.is_compiled_with_cuda() else 'without'} CUDA)"),
        ("NumPy", np.__version__),
        ("operators", operators),
    ]
    if state.path is not None:
        rows.append(("library", str(state.path)))
        rows.append(("vector instructions", os.environ.get("PADDLE_PRIVACY_ISA") or "the widest of this processor"))
    rows += [
        ("PADDLE_PRIVACY_EXT", os.environ.get("PADDLE_PRIVACY_EXT", "auto (not set)")),
        ("build cache", str(build.cache_folder())),
        ("C++ compiler", _compiler()),
        ("CUDA toolkit", _toolkit()),
        ("noise", "ChaCha20, 256-bit key from the operating system; the same stream on every path"),
        ("threads", os.environ.get("OMP_NUM_THREADS", "OMP_NUM_THREADS is not set")),
    ]
    return rows


def info() -> None:
    """What is installed here, and which code does the arithmetic: native operators or the reference path, and why."""
    rows = installation()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        sys.stdout.write(f"{name:<{width}}  {value}\n")


def _compiler() -> str:
    try:
        return build.compiler_version(build.find_compiler())
    except build.BuildError as error:
        return str(error)


def _toolkit() -> str:
    try:
        return str(build.cuda_home())
    except build.BuildError as error:
        return str(error)
