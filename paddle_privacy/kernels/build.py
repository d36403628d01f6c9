"""Compiling the native operators. Standard library only: ``setup.py`` runs this file outside the package."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).with_name("csrc")
MARKER = b"paddle_privacy_build="

# The stream of noise rounds after every operation; everything else may fuse, which is faster and more accurate.
_CPU_UNITS = {"noise.cc": ["-ffp-contract=off"], "reduce.cc": ["-ffp-contract=fast"]}
_CUDA_UNIT = "kernels.cu"
_CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
]


class BuildError(RuntimeError):
    """The native operators cannot be compiled here; the message says why."""


class Paddle(NamedTuple):
    """The installed Paddle, read from its files without importing it."""

    root: Path
    version: str
    commit: str
    with_cuda: bool


def installed_paddle() -> Paddle:
    """Raises :class:`BuildError` when there is none, or one older than 3.0."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or not spec.origin:
        raise BuildError("paddle is not installed in the building Python; install with --no-build-isolation.")
    root = Path(spec.origin).parent
    facts: dict[str, object] = {}
    for node in ast.parse((root / "version" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                facts[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    version = str(facts.get("full_version", "0"))
    if int(version.split(".")[0]) < 3 and version != "0.0.0":
        raise BuildError(f"Paddle {version} is older than 3.0, the oldest that the native operators support.")
    cuda = str(facts.get("cuda_version", "False"))
    return Paddle(root, version, str(facts.get("commit", "")), cuda not in ("False", "", "0.0"))


def source_hash() -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(SOURCES.glob("*.*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build_id(paddle: Paddle, device: str) -> str:
    """What a library must have been built for to be safe in this process."""
    return f"paddle-{paddle.version}-{paddle.commit[:12]};source-{source_hash()};{device};{platform.machine()}"


def id_in_file(path: Path) -> str | None:
    """The build id embedded in a library, found without loading it."""
    data = path.read_bytes()
    start = data.find(MARKER)
    if start < 0:
        return None
    start += len(MARKER)
    return data[start : data.index(b"\0", start)].decode(errors="replace")


def find_compiler() -> str:
    """Path of the C++ compiler: ``$CXX``, else g++, c++ or clang++. Raises :class:`BuildError`."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"native operators are built on Linux only, not on {sys.platform}.")
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildError("no C++ compiler found (g++, c++, clang++ or $CXX).")


def compiler_version(compiler: str) -> str:
    out = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return out.splitlines()[0] if out else "unknown"


def cuda_home() -> Path:
    """The CUDA toolkit: ``$CUDA_HOME``, ``$CUDA_PATH``, or the one that nvcc on the path belongs to."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc:
        candidates.insert(2, str(Path(nvcc).resolve().parent.parent))
    for candidate in candidates:
        folder = Path(candidate or "/nonexistent")
        if (folder / "bin" / "nvcc").exists() and (folder / "include" / "cuda_runtime_api.h").exists():
            return folder
    raise BuildError("no CUDA toolkit found: set CUDA_HOME to the folder that holds bin/nvcc and include.")


def cuda_architectures() -> list[str]:
    """``PADDLE_PRIVACY_CUDA_ARCH`` as "80;90", by default every architecture from sm_70 that this nvcc knows."""
    asked = os.environ.get("PADDLE_PRIVACY_CUDA_ARCH", "").replace(",", ";").replace(".", "")
    known = subprocess.run(
        [str(cuda_home() / "bin" / "nvcc"), "--list-gpu-code"], capture_output=True, text=True, check=False
    ).stdout.split()
    if asked:
        return [name.strip() for name in asked.split(";") if name.strip()]
    return [name for name in ("70", "80", "90") if f"sm_{name}" in known] or ["80"]


def compile_library(target: Path, device: str, paddle: Paddle | None = None) -> None:
    """Build the operators for ``device`` ("cpu" or "cuda") and move the library to ``target`` in one step.

    Raises:
        BuildError: with the compiler's own words.
    """
    paddle = paddle or installed_paddle()
    compiler = find_compiler()
    include = paddle.root / "include"
    if not include.is_dir():
        raise BuildError(f"this Paddle has no C++ headers at {include}.")
    openmp = paddle.root / "libs" / "libiomp5.so"
    # Paddle's own OpenMP or none: a second runtime in the process hangs forked DataLoader workers.
    parallel = ["-fopenmp"] if openmp.exists() else []
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paddle_privacy_build_") as folder:
        work = Path(folder)
        commands: list[tuple[str, list[str]]] = []
        for name, flags in _CPU_UNITS.items():
            commands.append((name, [compiler, *_CXX_FLAGS, *flags, *parallel]))
        binding = [compiler, *_CXX_FLAGS, "-O2", "-w", f'-DPP_BUILD_ID="{build_id(paddle, device)}"']
        binding += ["-DPADDLE_WITH_CUSTOM_KERNEL", f"-I{include}", f"-I{include / 'third_party'}"]
        link = [f"-L{paddle.root / 'base'}", f"-L{paddle.root / 'libs'}", "-Wl,--no-as-needed", "-l:libpaddle.so"]
        if parallel:
            link.append("-l:libiomp5.so")
        if device == "cuda":
            home = cuda_home()
            binding += ["-DPADDLE_WITH_CUDA", "-DPP_WITH_CUDA", f"-I{home / 'include'}"]
            # Where CUDA 13 keeps thrust, which Paddle's headers include.
            binding.append(f"-I{home / 'include' / 'cccl'}")
            link += [f"-L{home / 'lib64'}", "-lcudart"]
            codes = [flag for a in cuda_architectures() for flag in ("-gencode", f"arch=compute_{a},code=sm_{a}")]
            commands.append(
                (
                    _CUDA_UNIT,
                    [str(home / "bin" / "nvcc"), "-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-fmad=true", *codes],
                )
            )
        commands.append(("ops.cc", binding))
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            objects = list(pool.map(lambda command: _compile(command[1], command[0], work), commands))
        library = work / "ops.so"
        # -z now: a missing symbol is then an error while loading, not the end of the process at the first call.
        _run([compiler, "-shared", *map(str, objects), *link, "-Wl,-z,now", "-o", str(library)])
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(library, staged)
        os.replace(staged, target)


def _compile(command: list[str], source: str, work: Path) -> Path:
    target = work / (source + ".o")
    _run([*command, "-c", str(SOURCES / source), "-o", str(target)])
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise BuildError("\n".join([f"{Path(command[0]).name} failed on {command[-3]}:", *words[:30]]))


def cache_folder() -> Path:
    """Where lazily built libraries are kept: ``PADDLE_PRIVACY_CACHE``, else the user's cache folder."""
    asked = os.environ.get("PADDLE_PRIVACY_CACHE")
    if asked:
        return Path(asked)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paddle_privacy"
