"""Gradient-space audit: canaries that are as visible as clipping, noise and sampling allow.

Canary i is a row whose gradient points along coordinate i alone, far longer than the clip norm. If its coin put it in
the data, every noisy update it takes part in moves coordinate i by exactly C before noise. Different canaries touch
different coordinates, so m independent copies of the worst case of DP-SGD are observed in one run. The whole path
is the library's own: capture, clipping, sampling, noise, update, accounting.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .canaries import flip_coins
from .result import AuditResult, ScoredRun, judge

STEEPNESS = 1e3
"""Length of a canary's gradient in clip norms; what clipping has to take away."""


def audit_mechanism(
    *,
    noise_multiplier: float,
    steps: int = 1,
    sample_rate: float = 1.0,
    clip_norm: float = 1.0,
    delta: float = 1e-5,
    canaries: int = 1000,
    confidence: float = 0.95,
    seed: int | None = None,
    optimizer_class: Any = None,
    **optimizer_arguments: Any,
) -> AuditResult:
    """Trains on canaries only, with a private optimizer of this library, and tries to refute its ε.

    Args:
        noise_multiplier, clip_norm, sample_rate, steps: of the audited run. Rate 1 is full batch, else Poisson.
        delta: δ of the claim.
        canaries: m; :func:`~paddle_privacy.audit.flip_coins` puts about half of them into the data.
        confidence: of all bounds together.
        seed: of the coins; the system's entropy when None.
        optimizer_class: :class:`paddle_privacy.DPSGD` or another class whose steps follow the noisy gradient.
        optimizer_arguments: further keywords of the optimizer, such as ``clipping=`` or ``accountant=``.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1")
    coins = flip_coins(canaries, seed)
    run = _train(coins, noise_multiplier, steps, sample_rate, clip_norm, delta, optimizer_class, optimizer_arguments)
    return judge(
        run,
        coins,
        confidence,
        audit="gradient-space canaries",
        noise_multiplier=noise_multiplier,
        steps=steps,
        sample_rate=sample_rate,
        clip_norm=clip_norm,
    )


def _train(
    coins: np.ndarray,
    noise_multiplier: float,
    steps: int,
    sample_rate: float,
    clip_norm: float,
    delta: float,
    optimizer_class: Any,
    optimizer_arguments: dict[str, Any],
) -> ScoredRun:
    import paddle

    from .. import DPSGD, PoissonBatchSampler

    count, rows = len(coins), np.flatnonzero(coins)
    model = paddle.nn.Linear(count, 1, weight_attr=paddle.nn.initializer.Constant(0.0), bias_attr=False)
    expected = sample_rate * len(rows)
    make = optimizer_class or DPSGD
    sampling: dict[str, Any] = {"sampling": "none"}
    if sample_rate < 1:
        sampler = PoissonBatchSampler(sample_rate=sample_rate, num_rows=len(rows), steps=steps)
        loader = paddle.io.DataLoader(_Rows(rows), batch_sampler=sampler)  # type: ignore[arg-type]
        sampling = {"data_loader": loader}
    optimizer = make(
        learning_rate=1.0,
        parameters=model.parameters(),
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        batch_size=expected,
        target_delta=delta,
        **sampling,
        **optimizer_arguments,
    )
    batches = iter(loader) if sample_rate < 1 else ((paddle.to_tensor(rows),) for _ in range(steps))
    for (batch,) in batches:
        inputs = paddle.nn.functional.one_hot(batch.reshape([-1]), count) * (STEEPNESS * clip_norm)
        model(inputs).mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    moved = -np.asarray(model.weight.numpy(), dtype=np.float64).reshape(-1)
    return ScoredRun({"update along the canary": moved}, optimizer.get_privacy_spent(delta).epsilon, delta)


class _Rows:
    """Canary numbers as a map-style data set."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray]:
        return (np.asarray(self.rows[index], dtype=np.int64),)
