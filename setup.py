"""The build's entry; metadata lives in pyproject.toml.

The native operators are built when this machine can: with ``paddle`` importable (``--no-build-isolation``) and a C++
compiler. Otherwise the package installs without them and builds them on first use, or runs on its reference path.
``PADDLE_PRIVACY_EXT=0`` leaves them out; ``cpu`` or ``cuda`` make a failure an error.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
CHOICE = os.environ.get("PADDLE_PRIVACY_EXT", "auto").strip().lower() or "auto"
STRICT = CHOICE in ("cpu", "cuda")


def load_build():
    """The compiling code of the package, without importing the package (and Paddle with it)."""
    path = ROOT / "paddle_privacy" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("paddle_privacy_build", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildOperators(build_ext):
    """One library for every Python version, so its name carries no Python tag."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        build = load_build()
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            paddle = build.installed_paddle()
            device = CHOICE if STRICT else "cuda" if paddle.with_cuda and has_cuda(build) else "cpu"
            build.compile_library(target, device, paddle)
        except build.BuildError as error:
            if STRICT:
                raise
            print(f"paddle-privacy: native operators not built: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """A wheel with the library is bound to the platform, but not to a Python version."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


def has_cuda(build):
    try:
        build.cuda_home()
    except build.BuildError:
        return False
    return True


def operators():
    """The extension if an attempt to build it makes sense; a pure-Python package else."""
    if CHOICE not in ("auto", "0", "cpu", "cuda"):
        raise SystemExit(f"PADDLE_PRIVACY_EXT must be auto, 0, cpu or cuda, not {CHOICE!r}.")
    if CHOICE == "0":
        return []
    build = load_build()
    try:
        build.installed_paddle()
        build.find_compiler()
    except build.BuildError as error:
        if STRICT:
            raise SystemExit(f"PADDLE_PRIVACY_EXT={CHOICE}: {error}") from error
        print(f"paddle-privacy: native operators not built: {error}", file=sys.stderr)
        return []
    return [Extension("paddle_privacy.kernels.paddle_privacy_ops", sources=[], optional=not STRICT)]


setup(ext_modules=operators(), cmdclass={"build_ext": BuildOperators, "bdist_wheel": PlatformWheel})
