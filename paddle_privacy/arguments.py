"""What a private optimizer's arguments may be; a refused one is named, with what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from paddle import Tensor

from paddle_privacy.clipping import positive
from paddle_privacy.noise import NoiseGenerator
from paddle_privacy.schedules import Schedule
from paddle_privacy.spending import SAMPLINGS

LOSS_REDUCTIONS = ("mean", "sum")


def distinct_parameters(parameters: Any) -> list[Tensor]:
    """The parameters of a list or of parameter groups, each once."""
    if parameters is None:
        raise ValueError("parameters is missing: pass model.parameters(), parameter groups, or the model")
    if isinstance(parameters, (Tensor, dict)):
        raise TypeError(f"parameters must be a list of parameters or of groups, found {type(parameters).__name__}")

    def flat() -> Iterator[Tensor]:
        for item in parameters:
            yield from item["params"] if isinstance(item, dict) else (item,)

    found = list({id(p): p for p in flat()}.values())
    if not found:
        raise ValueError("parameters is empty; pass model.parameters() of a model that has some")
    return found


def noise_generator(generator: NoiseGenerator | None, secure: bool) -> NoiseGenerator:
    """The generator that `generator` and `secure` ask for; raises TypeError or ValueError where they disagree."""
    if generator is None:
        if not secure:
            raise ValueError("secure=False is only for tests with generator=NoiseGenerator.seeded(seed); pass one")
        return NoiseGenerator()
    if not isinstance(generator, NoiseGenerator):
        raise TypeError(f"generator must be a paddle_privacy.NoiseGenerator, found {type(generator).__name__}")
    if secure and not generator.secure:
        raise ValueError(
            "generator is seeded, so whoever knows the seed can subtract the noise; in a test pass secure=False too"
        )
    return generator


def check_arguments(
    *,
    noise_multiplier: Any,
    epochs: Any,
    dataset_size: Any,
    sampling: Any,
    target_epsilon: Any,
    target_delta: Any,
    max_epsilon: Any,
    loss_reduction: Any,
) -> None:
    if (noise_multiplier is None) == (target_epsilon is None):
        found = "neither" if noise_multiplier is None else "both"
        raise ValueError(f"give exactly one of noise_multiplier and target_epsilon, found {found}")
    if noise_multiplier is not None and not isinstance(noise_multiplier, Schedule):
        if isinstance(noise_multiplier, bool) or not isinstance(noise_multiplier, (int, float)):
            raise TypeError(f"noise_multiplier must be a number >= 0, found {noise_multiplier!r}")
        if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
            raise ValueError(f"noise_multiplier must be a finite number >= 0, found {noise_multiplier!r}")
    checks: list[tuple[str, Any, Callable[[str, Any], float]]] = [
        ("epochs", epochs, positive),
        ("target_epsilon", target_epsilon, positive),
        ("max_epsilon", max_epsilon, positive),
    ]
    for name, value, check in checks:
        if value is not None:
            check(name, value)
    if dataset_size is not None and (isinstance(dataset_size, bool) or not isinstance(dataset_size, int)):
        raise TypeError(f"dataset_size must be an integer number of rows, found {dataset_size!r}")
    if dataset_size is not None and dataset_size <= 0:
        raise ValueError(f"dataset_size must be greater than 0, found {dataset_size!r}")
    if target_delta is not None:
        if isinstance(target_delta, bool) or not isinstance(target_delta, (int, float)):
            raise TypeError(f"target_delta must be a number in (0, 1), found {target_delta!r}")
        if not 0 < target_delta < 1:
            raise ValueError(f"target_delta must be in (0, 1), found {target_delta!r}")
    for name, value in (("target_epsilon", target_epsilon), ("max_epsilon", max_epsilon)):
        if value is not None and target_delta is None:
            raise ValueError(f"{name} needs target_delta, the δ at which ε is meant, a number in (0, 1)")
    if target_epsilon is not None and epochs is None:
        raise ValueError("target_epsilon needs epochs, the length of training to calibrate the noise for")
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling must be one of {SAMPLINGS}, found {sampling!r}")
    if loss_reduction not in LOSS_REDUCTIONS:
        raise ValueError(f"loss_reduction must be one of {LOSS_REDUCTIONS}, found {loss_reduction!r}")
