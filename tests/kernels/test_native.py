"""Finding, building and refusing the native library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import paddle
import pytest

from paddle_privacy.info import installation
from paddle_privacy.kernels import build, native
from paddle_privacy.noise import NoiseGenerator

compiles = pytest.mark.skipif(
    shutil.which("g++") is None or not sys.platform.startswith("linux"), reason="needs Linux and g++"
)
PROGRAM = """
import paddle
from paddle_privacy.kernels import native
from paddle_privacy.noise import NoiseGenerator
x = paddle.zeros([1000])
NoiseGenerator.seeded(1).add_noise([x], 1.0)
state = native.state()
print("RESULT", state.device, "|", state.reason, "|", round(float(x.std()), 3))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that two processes, started at once and without a packaged library, had to fill."""
    folder = tmp_path_factory.mktemp("cache")
    hide = "import paddle_privacy.kernels.native as n; from pathlib import Path; n.PACKAGED = Path('/none')\n"
    environment = {**os.environ, "PADDLE_PRIVACY_CACHE": str(folder), "PADDLE_PRIVACY_EXT": "cpu"}
    running = [
        subprocess.Popen([sys.executable, "-c", hide + PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=300)[0] for process in running]
    assert all("RESULT cpu | built on first use" in result for result in results)
    return folder


@pytest.fixture(scope="module")
def library(cache: Path) -> Path:
    return next(cache.glob("ops-*.so"))


@compiles
def test_the_library_needs_one_openmp_entry(library: Path) -> None:
    """Any other would bind to a foreign runtime: see csrc/parallel.h."""
    names = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    openmp = {line.split()[-1].split("@")[0] for line in names.stdout.splitlines() if "omp" in line.lower()}
    assert openmp <= {"GOMP_parallel"}


@compiles
def test_build_id_is_found_without_loading(library: Path, tmp_path: Path) -> None:
    installed = build.installed_paddle()
    assert installed.version == paddle.__version__
    assert build.id_in_file(library) == build.build_id(installed, "cpu")
    other = tmp_path / "other.so"
    other.write_bytes(b"\x7fELF nothing of ours")
    assert build.id_in_file(other) is None


@compiles
def test_lazy_build_once_for_several_processes(cache: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(cache.glob("ops-*.so"))) == 1
    written = library.stat().st_mtime_ns
    monkeypatch.setenv("PADDLE_PRIVACY_CACHE", str(cache))
    installed = build.installed_paddle()
    found = native._cached(build.build_id(installed, "cpu"), "cpu", installed, strict=True)
    assert found == library and found.stat().st_mtime_ns == written


@compiles
def test_a_library_for_another_paddle_is_refused(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong.so"
    version = f"paddle-{paddle.__version__}".encode()
    wrong.write_bytes(library.read_bytes().replace(version, version[:-1] + b"9"))
    monkeypatch.setattr(native, "PACKAGED", wrong)
    seen = []
    monkeypatch.setattr(native, "_register", lambda path, device, origin: seen.append(path))
    monkeypatch.setattr(native, "_cached", lambda *arguments: library)
    native._load_for("cpu", strict=False)
    assert seen == [library]


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_PRIVACY_EXT", "0")
    assert native._load() == native.Native(None, "switched off by PADDLE_PRIVACY_EXT=0")


def test_no_compiler_serves_the_reference_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PADDLE_PRIVACY_CACHE", str(tmp_path)), ("PATH", str(tmp_path)), ("CXX", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native, "PACKAGED", tmp_path / "none")
    monkeypatch.setattr(native, "_state", None)
    monkeypatch.setenv("PADDLE_PRIVACY_EXT", "auto")
    x = paddle.zeros([1000])
    NoiseGenerator.seeded(1).add_noise([x], 1.0)
    assert (x.numpy() == NoiseGenerator.seeded(1).standard_normal(1000)).all()
    assert dict(installation())["operators"].startswith("reference path (numpy and Paddle operators): no")
    monkeypatch.setenv("PADDLE_PRIVACY_EXT", "cpu")
    with pytest.raises(RuntimeError, match="PADDLE_PRIVACY_EXT=cpu asks for native operators, but: n"):
        native._load()


def test_a_failed_build_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("native operators are built on Linux only")
    compiler = tmp_path / "bad-compiler"
    compiler.write_text(f"#!/bin/sh\necho call >> {tmp_path}/calls\necho 'it broke' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("PADDLE_PRIVACY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "PACKAGED", tmp_path / "none")
    with pytest.raises(build.BuildError, match="it broke"):
        native._load_for("cpu", strict=False)
    calls = (tmp_path / "calls").read_text().count("call")
    with pytest.raises(build.BuildError, match="an earlier build failed"):
        native._load_for("cpu", strict=False)
    monkeypatch.setenv("PADDLE_PRIVACY_EXT", "auto")
    # One more call asks the compiler for its version.
    assert (tmp_path / "calls").read_text().count("call") <= calls + 1
    assert native._load().device is None


def test_unknown_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_PRIVACY_EXT", "gpu")
    with pytest.raises(ValueError, match="must be one of auto, 0, cpu, cuda, not 'gpu'"):
        native._load()


@pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="this Paddle has CUDA")
def test_cuda_needs_a_paddle_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_PRIVACY_EXT", "cuda")
    with pytest.raises(RuntimeError, match="this Paddle is built without CUDA"):
        native._load()


def test_info_has_no_surprises() -> None:
    rows = dict(installation())
    assert rows["Paddle"].startswith(paddle.__version__)
    assert rows["operators"].startswith(("native for", "reference path"))
