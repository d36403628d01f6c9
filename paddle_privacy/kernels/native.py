"""Finding, building and loading the native operators, or saying why the reference path is used.

``PADDLE_PRIVACY_EXT`` chooses: ``auto`` (default) takes native code where it can be had, ``0`` never, ``cpu`` or
``cuda`` insist and raise. A library is loaded only if the build id inside the file matches the running Paddle and
these sources; one that was built for another Paddle would end the process at its first call.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import paddle

from . import build

PACKAGED = Path(__file__).with_name("paddle_privacy_ops.so")
CHOICES = ("auto", "0", "cpu", "cuda")


class Native(NamedTuple):
    """The state of native code in this process.

    ``device`` is "cpu" (CPU tensors), "cuda" (CPU and CUDA tensors) or None (reference path); ``reason`` is one
    sentence for people; ``path`` the loaded library.
    """

    device: str | None
    reason: str
    path: Path | None = None


_state: Native | None = None


def state() -> Native:
    """Native code as this process has it; the first call loads it, and builds it if there is none."""
    global _state
    if _state is None:
        _state = _load()
    return _state


def serves(*tensors: paddle.Tensor) -> bool:
    """Whether the native operators can take these tensors."""
    device = state().device
    if device is None:
        return False
    if all(tensor.place.is_cpu_place() for tensor in tensors):
        return True
    return device == "cuda" and all(tensor.place.is_gpu_place() for tensor in tensors)


def call(operator: str, *arguments: Any) -> None:
    """Run a native operator; its results go into tensors among the arguments."""
    from paddle import _C_ops

    run: Any = getattr(_C_ops, "_run_custom_op")  # noqa: B009 (Paddle's stubs do not list it)
    with paddle.no_grad():
        run(f"paddle_privacy_{operator}", *arguments)


def isa() -> int:
    """The widest vector instructions to use: -1 for what the processor has; ``PADDLE_PRIVACY_ISA`` narrows it."""
    return {"baseline": 0, "avx2": 1, "avx512": 2}.get(os.environ.get("PADDLE_PRIVACY_ISA", "").lower(), -1)


def _load() -> Native:
    choice = os.environ.get("PADDLE_PRIVACY_EXT", "auto").strip().lower() or "auto"
    if choice not in CHOICES:
        raise ValueError(f"PADDLE_PRIVACY_EXT must be one of {', '.join(CHOICES)}, not {choice!r}.")
    if choice == "0":
        return Native(None, "switched off by PADDLE_PRIVACY_EXT=0")
    strict = choice != "auto"
    devices = [choice] if strict else ["cuda", "cpu"] if paddle.is_compiled_with_cuda() else ["cpu"]
    reasons = []
    for device in devices:
        try:
            return _load_for(device, strict)
        # Whatever goes wrong while building or loading, the reference path can serve.
        except Exception as error:
            if strict:
                raise RuntimeError(f"PADDLE_PRIVACY_EXT={choice} asks for native operators, but: {error}") from error
            reasons.append(f"{device}: {error}" if len(devices) > 1 else str(error))
    return Native(None, "; ".join(reasons))


def _load_for(device: str, strict: bool) -> Native:
    installed = build.installed_paddle()
    if installed.version != paddle.__version__:
        raise build.BuildError(f"the imported Paddle is {paddle.__version__}, the installed one {installed.version}.")
    if device == "cuda" and not paddle.is_compiled_with_cuda():
        raise build.BuildError("this Paddle is built without CUDA.")
    wanted = build.build_id(installed, device)
    if PACKAGED.exists() and build.id_in_file(PACKAGED) == wanted:
        return _register(PACKAGED, device, "built at installation")
    path = _cached(wanted, device, installed, strict)
    return _register(path, device, "built on first use")


def _register(path: Path, device: str, origin: str) -> Native:
    from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

    load_op_meta_info_and_register_op(str(path))
    return Native(device, f"{origin} for Paddle {paddle.__version__}", path)


def _cached(wanted: str, device: str, installed: build.Paddle, strict: bool) -> Path:
    """The cached library for this build id, compiled now if need be; one process compiles, the others wait."""
    import fcntl

    folder = build.cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise build.BuildError(f"the cache folder {folder} belongs to another user; set PADDLE_PRIVACY_CACHE.")
    try:
        compiler = build.find_compiler()
        words = f"{wanted};{compiler};{build.compiler_version(compiler)}"
    except build.BuildError:
        usable = [path for path in sorted(folder.glob("ops-*.so")) if build.id_in_file(path) == wanted]
        if usable:
            return usable[0]
        raise
    if device == "cuda":
        words += ";" + ";".join(build.cuda_architectures())
    path = folder / f"ops-{hashlib.sha256(words.encode()).hexdigest()[:24]}.so"
    failure = path.with_suffix(".failed")
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and build.id_in_file(path) == wanted:
            return path
        if failure.exists() and not strict:
            raise build.BuildError(f"an earlier build failed; {failure} has the compiler's words, delete it to retry.")
        try:
            build.compile_library(path, device, installed)
        except build.BuildError as error:
            failure.write_text(str(error))
            raise
        failure.unlink(missing_ok=True)
    return path
