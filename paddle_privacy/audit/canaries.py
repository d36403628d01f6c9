"""Who is in and who is out: coins for canaries, and canaries that are hard to explain without having been seen."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def flip_coins(count: int, seed: int | None = None) -> np.ndarray:
    """[count] bool, independent and fair: what the one-run bounds need. Without a seed the system's entropy is used."""
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    generator = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
    return generator.random(count) < 0.5


def mislabel(labels: ArrayLike, classes: int, seed: int = 0) -> np.ndarray:
    """Every label moved to another class, uniformly: rows that a model fits only if it was trained on them."""
    if classes < 2:
        raise ValueError(f"classes is {classes}; mislabelling needs at least 2")
    values = np.asarray(labels)
    generator = np.random.default_rng(seed)
    return ((values + generator.integers(1, classes, size=values.shape)) % classes).astype(values.dtype)


def random_directions(count: int, shapes: Sequence[tuple[int, ...]], norm: float, seed: int = 0) -> list[np.ndarray]:
    """``count`` gradients for gradient-space canaries, one array [count, *shape] a parameter, each of L2 norm ``norm``.

    Independent Gaussian directions: nearly orthogonal in high dimension, so canaries hardly disturb each other.
    """
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    if not norm > 0:
        raise ValueError(f"norm is {norm}; it must be positive")
    generator = np.random.default_rng(seed)
    parts = [generator.standard_normal((count, *shape)).astype(np.float32) for shape in shapes]
    squares = np.sum([np.square(part.reshape(count, -1), dtype=np.float64).sum(axis=1) for part in parts], axis=0)
    scale = norm / np.sqrt(squares)
    return [(part * scale.reshape(-1, *(1,) * (part.ndim - 1))).astype(np.float32) for part in parts]
