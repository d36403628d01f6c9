"""The CUDA kernels' arithmetic, run by the CUDA harness's own tests on a CPU that plays a GPU.

Machines without a GPU can thus check indices, bounds and formulas; speed and races need a real one (docs/gpu.md).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from paddle_privacy.kernels import build

EMULATION = Path(__file__).with_name("cuda_emulation")
LAUNCH = re.compile(r"([\w:]+(?:<[\w:]+>)?)<<<(.*?)>>>\((.*?)\);", re.DOTALL)


def _as_cpp(text: str) -> str:
    """``kernel<<<grid, threads, 0, stream>>>(arguments);`` is not C++: a call of the emulator is."""

    def launch(match: re.Match[str]) -> str:
        kernel, configuration, arguments = match.groups()
        blocks, threads = re.fullmatch(r"(.*), (\w+), 0, stream", configuration, re.DOTALL).groups()  # type: ignore[union-attr]
        return f"emulation::launch({blocks}, {threads}, [&] {{ {kernel}({arguments}); }});"

    return LAUNCH.sub(launch, text)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation is compiled with g++")
def test_cuda_kernels_on_a_cpu(tmp_path: Path) -> None:
    sources = tmp_path / "csrc"
    (sources / "harness").mkdir(parents=True)
    for path in (*build.SOURCES.glob("*.*"), *(build.SOURCES / "harness").glob("*.cu")):
        target = sources / path.relative_to(build.SOURCES)
        target.write_text(_as_cpp(path.read_text()))
    commands = []
    for source in ("kernels.cu", "harness/harness.cu", "noise.cc"):
        target = tmp_path / (Path(source).stem + ".o")
        flags = ["-std=c++20", "-O1", "-w", "-fno-math-errno", "-ffp-contract=off", f"-I{EMULATION}"]
        commands.append(["g++", *flags, "-x", "c++", "-c", str(sources / source), "-o", str(target)])
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        _, words = process.communicate(timeout=300)
        assert process.returncode == 0, words[-3000:]
    program = tmp_path / "harness"
    subprocess.run(["g++", *map(str, tmp_path.glob("*.o")), "-o", str(program)], check=True)
    done = subprocess.run([str(program), "--small"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "BAD" not in done.stdout, done.stdout[-4000:] + done.stderr[-1000:]
    assert done.stdout.count(" ok ") > 40
