"""Is training on this machine and device as private as it says? Measured through the public optimizer.

Every statistical check has a false-alarm rate of at most :data:`FALSE_ALARM`; a check that fails is a finding.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

FALSE_ALARM = 1e-7
SIGMA, CLIP, BATCH, RATE = 1.3, 0.7, 5, 0.5
"""Chosen so that a forgotten factor (C, σ, batch size, learning rate) changes the result by more than a test allows."""
WIDTH = 400
"""Two layers of WIDTH x WIDTH weights: 320,000 noisy coordinates a step."""

_RANK_PROGRAM = (
    "import numpy, paddle, paddle_privacy\n"
    "x = paddle.zeros([4096])\n"
    "paddle_privacy.NoiseGenerator().add_noise([x], 1.0)\n"
    "print('NOISE', x.numpy().astype('float32').tobytes().hex())\n"
)


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    expected: str
    found: str
    passed: bool


def run_selftest(ranks: bool = True) -> list[Check]:
    """All checks, in under a minute on two cores.

    Args:
        ranks: also start two fresh processes and compare their noise (about ten seconds).
    """
    steps = _noise_of_steps(3)
    flat = [np.concatenate([part.ravel() for part in step]) for step in steps]
    checks = [
        _source(),
        _scale(flat[0]),
        _shape(flat[0]),
        _uncorrelated("Two steps are independent", flat[0], flat[1]),
        _uncorrelated("Neighbouring coordinates are independent", flat[0][:-1], flat[0][1:]),
        _uncorrelated("Two parameters are independent", steps[0][0].ravel(), steps[0][1].ravel()),
        _uncorrelated("A copied optimizer state does not replay noise", *_noise_after_resume()),
        _sparse_parameter(steps),
    ]
    checks += [_clipped(clipping) for clipping in ("flat", "automatic", "psac")]
    checks += [_ledger(), _audit()]
    if ranks:
        checks.append(_ranks())
    return checks


def _optimizer(model: Any, **changes: Any) -> Any:
    from . import DPSGD

    arguments: dict[str, Any] = {
        "learning_rate": RATE,
        "parameters": model.parameters(),
        "clip_norm": CLIP,
        "noise_multiplier": SIGMA,
        "batch_size": BATCH,
        "sampling": "none",
        **changes,
    }
    return DPSGD(**arguments)


def _two_layers() -> Any:
    import paddle

    return paddle.nn.Sequential(
        paddle.nn.Linear(WIDTH, WIDTH, bias_attr=False), paddle.nn.Linear(WIDTH, WIDTH, bias_attr=False)
    )


def _step(model: Any, optimizer: Any, inputs: Any) -> list[np.ndarray]:
    """What one step adds to the sum, per parameter: the movement times batch size over learning rate."""
    before = [np.asarray(p.numpy(), dtype=np.float64) for p in model.parameters()]
    model(inputs).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
    after = [np.asarray(p.numpy(), dtype=np.float64) for p in model.parameters()]
    return [(old - new) * BATCH / RATE for old, new in zip(before, after)]


def _noise_of_steps(count: int) -> list[list[np.ndarray]]:
    """Noise alone: with zero input no gradient reaches either layer."""
    import paddle

    model = _two_layers()
    for parameter in model.parameters():
        # Around zero, float32 keeps all digits of the movement.
        parameter.set_value(paddle.zeros_like(parameter))
    optimizer = _optimizer(model)
    return [_step(model, optimizer, paddle.zeros([BATCH, WIDTH])) for _ in range(count)]


def _noise_after_resume() -> tuple[np.ndarray, np.ndarray]:
    import paddle

    noises = []
    state: Any = None
    for _ in range(2):
        model = paddle.nn.Linear(WIDTH, WIDTH, bias_attr=False)
        optimizer = _optimizer(model)
        if state is not None:
            optimizer.set_state_dict(state)
        state = optimizer.state_dict()
        noises.append(_step(model, optimizer, paddle.zeros([BATCH, WIDTH]))[0].ravel())
    return noises[0], noises[1]


def _source() -> Check:
    from . import NoiseGenerator

    described = NoiseGenerator().describe()
    return Check("Noise key", "from the operating system", str(described["kind"]), bool(described["secure"]))


def _scale(noise: np.ndarray) -> Check:
    """The sum of squares over (σC)² is chi-square with n degrees of freedom."""
    count = len(noise)
    ratio = math.sqrt(float(noise @ noise) / count) / (SIGMA * CLIP)
    # Wilson–Hilferty is exact enough at this n; half a per cent of slack is for float32 rounding of the weights.
    reach = float(special.ndtri(1 - FALSE_ALARM / 2)) / math.sqrt(2 * count) + 1e-4
    return Check(
        "Noise scale on the sum", f"σ·C = {SIGMA * CLIP:.4f}", f"{ratio * SIGMA * CLIP:.4f}", abs(ratio - 1) < reach
    )


def _shape(noise: np.ndarray) -> Check:
    """Kolmogorov–Smirnov distance to the normal law (Massart's bound)."""
    ordered = np.sort(noise) / (SIGMA * CLIP)
    law = special.ndtr(ordered)
    index = np.arange(len(ordered))
    distance = float(max((law - index / len(law)).max(), ((index + 1) / len(law) - law).max()))
    limit = math.sqrt(math.log(2 / FALSE_ALARM) / (2 * len(law)))
    return Check("Noise is Gaussian", f"distance < {limit:.5f}", f"{distance:.5f}", distance < limit)


def _uncorrelated(name: str, first: np.ndarray, second: np.ndarray) -> Check:
    count = len(first)
    correlation = float(np.corrcoef(first, second)[0, 1])
    limit = float(special.ndtri(1 - FALSE_ALARM / 2)) / math.sqrt(count)
    return Check(name, f"|correlation| < {limit:.5f}", f"{correlation:+.5f}", abs(correlation) < limit)


def _sparse_parameter(steps: list[list[np.ndarray]]) -> Check:
    """A parameter that no row's gradient touches must move, or its stillness tells who was absent."""
    still = min(float((part != 0).mean()) for step in steps for part in step)
    return Check(
        "Parameters without a gradient are noised", "every coordinate moves", f"{still:.2%} moved", still > 0.999
    )


def _clipped(clipping: str) -> Check:
    """One row whose gradient is 10⁵ times too long, no noise: the sum may not pass the sensitivity."""
    import paddle

    model = _two_layers()
    optimizer = _optimizer(model, noise_multiplier=0.0, clipping=clipping)
    inputs = paddle.zeros([BATCH, WIDTH])
    inputs[0] = 1e5
    moved = _step(model, optimizer, inputs)
    norm = math.sqrt(sum(float((part**2).sum()) for part in moved))
    limit = float(optimizer.clipping.sensitivity)
    return Check(
        f"A huge gradient is clipped ({clipping})", f"norm <= {limit:g}", f"{norm:.5f}", 0 < norm <= limit * (1 + 1e-3)
    )


def _ledger() -> Check:
    from .ledger import REQUIRED_HEADER, Ledger
    from .verify.chain import read_ledger

    event = {"event": "Gaussian", "noise_multiplier": 1.0}
    with tempfile.TemporaryDirectory(dir=os.getcwd() if os.access(os.getcwd(), os.W_OK) else None) as folder:
        path = os.path.join(folder, "ledger.jsonl")
        with Ledger(path).open({**dict.fromkeys(REQUIRED_HEADER), "relation": "add_or_remove_one"}) as ledger:
            started = time.perf_counter()
            for step in range(50):
                ledger.append(event, float(step), step)
            cost = (time.perf_counter() - started) / 50
        intact = read_ledger(path).steps == 50
    return Check("Ledger is durable and verifies", "50 records", f"{cost * 1e3:.2f} ms a record", intact)


def _audit() -> Check:
    from .audit import audit_mechanism

    result = audit_mechanism(noise_multiplier=1.0, steps=4, canaries=600, confidence=1 - FALSE_ALARM)
    return Check(
        "Attack with 600 gradient canaries",
        f"ε̂ <= ε = {result.epsilon:.2f}",
        f"ε̂ = {result.best:.2f}",
        not result.refuted,
    )


def _ranks() -> Check:
    """Two fresh processes with the same surroundings, as data-parallel ranks are."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK_PROGRAM],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    noises = []
    for process in started:
        output, problem = process.communicate(timeout=120)
        lines = [line for line in output.splitlines() if line.startswith("NOISE ")]
        if process.returncode or not lines:
            return Check("Two ranks are independent", "two processes", f"a process failed: {problem[-200:]}", False)
        noises.append(np.frombuffer(bytes.fromhex(lines[0][6:]), dtype=np.float32).astype(np.float64))
    return _uncorrelated("Two ranks are independent", *noises)


def print_checks(checks: list[Check], device: str, write: Callable[[str], Any] = print) -> bool:
    """The table; returns whether everything passed."""
    widths = [max(len(getattr(check, name)) for check in checks) for name in ("name", "expected", "found")]
    write(f"paddle_privacy selftest on {device}")
    for check in checks:
        cells = (check.name.ljust(widths[0]), check.expected.ljust(widths[1]), check.found.ljust(widths[2]))
        write(f"  {'ok  ' if check.passed else 'FAIL'}  " + "  ".join(cells))
    failed = sum(not check.passed for check in checks)
    write(
        "all checks passed" if not failed else f"{failed} of {len(checks)} checks failed; do not train on this machine"
    )
    return not failed
