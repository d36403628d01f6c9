"""Keys, the noise generator and the Gaussian mechanism.

The guarantee of differentially private training is exactly as good as its noise: whoever can predict the noise can
subtract it. The noise therefore comes from ChaCha20 under a 256-bit key of the operating system, not from
``paddle.seed`` (whose CPU generator has 2^32 states). ``docs/noise.md`` holds the argument; :mod:`.kernels.stream`
fixes which bits become which value.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from . import kernels
from .errors import PrivacyError
from .kernels.noise_step import Noise
from .kernels.stream import BLOCKS_PER_ROW, rows_needed, standard_normals

HARDENINGS = ("grid", "sum", "none")

# Spacing of the "grid" hardening: the power of two in (std * 2^-11, std * 2^-10]. Rounding adds at most
# (2^-10)^2 / 12 = 8e-8 of the noise variance.
_GRID_BITS = 10

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class NoiseGenerator:
    """A stream of Gaussian noise that is never repeated.

    ``NoiseGenerator()`` takes a fresh 256-bit key from ``os.urandom``. Copies (``copy``, ``deepcopy``, ``pickle``) and
    forked children never continue the same stream: they take a key of their own. There is no state to save: a resumed
    run makes a new generator, so noise cannot be replayed.

    Args:
        hardening: defence against attacks on floating-point noise. ``"grid"`` (default) rounds every noisy value to a
            multiple of a power of two near ``std / 1024``, so that the set of reachable values no longer depends on
            the secret (Mironov, "On significance of the least significant bits for differential privacy", 2012);
            ``"sum"`` adds four independent draws instead of one (Holohan and Braghin, "Secure random sampling in
            differential privacy", 2021), at four times the cost; ``"none"``.
    """

    def __init__(self, *, hardening: str = "grid") -> None:
        if hardening not in HARDENINGS:
            raise ValueError(f"hardening must be one of {', '.join(map(repr, HARDENINGS))}, not {hardening!r}.")
        self._hardening = hardening
        self._secure = True
        self._set_key(os.urandom(32))

    @classmethod
    def seeded(cls, seed: int, *, stream: int = 0, hardening: str = "none") -> NoiseGenerator:
        """A deterministic generator **for tests only**: whoever knows ``seed`` can remove the noise.

        Different ``stream`` numbers (a rank, say) give independent noise for the same seed.
        """
        for name, value in (("seed", seed), ("stream", stream)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} must be an int, not {type(value).__name__}.")
        generator = cls(hardening=hardening)
        generator._secure = False
        generator._set_key(hashlib.sha256(f"paddle_privacy seeded noise {seed} {stream}".encode()).digest())
        return generator

    @property
    def secure(self) -> bool:
        """True when the key came from the operating system, False for :meth:`seeded`."""
        return self._secure

    def add_noise(self, sums: Sequence[paddle.Tensor], std: float | Sequence[float]) -> None:
        """Add N(0, std²) to every element of every tensor, in place (the Gaussian mechanism, once).

        The guarantee is that of ``std = noise_multiplier * sensitivity``; the caller owns the sensitivity. Noise is
        drawn with float32 precision also for float64 tensors. A std that float32 cannot represent is rounded up,
        never down. ``std == 0`` changes nothing and consumes nothing of the stream.

        Args:
            sums: float32 or float64 tensors of any shape (empty ones too).
            std: standard deviation of the noise, finite and >= 0: one number, or one a tensor.

        Raises:
            TypeError, ValueError: an argument is refused; no tensor has then been touched.
        """
        noise = self.reserve(sums, std)
        noisy = [i for i, scale in enumerate(noise.stds) if scale > 0 and sums[i].size > 0]
        if noisy:
            kernels.add_noise([sums[i] for i in noisy], noise.select(noisy))

    def clip_noise(
        self,
        gradients: Sequence[paddle.Tensor],
        clip_norms: float | Sequence[float],
        std: float | Sequence[float],
    ) -> tuple[list[paddle.Tensor], paddle.Tensor, paddle.Tensor]:
        """Clip per-sample gradients ``[B, ...]``, sum them over the samples and add N(0, std²) to the sums.

        Arguments and results are those of :func:`.kernels.clip_and_sum`, whose bound ``clip_norms`` is the sensitivity
        of the sums (its norm over the tensors under per-layer clipping); samples that are not finite are left out and
        have factor 0. With B = 0 the result is noise alone.
        """
        sums, squared_norms, factors = kernels.clip_and_sum(gradients, clip_norms)
        self.add_noise(sums, std)
        return sums, squared_norms, factors

    def reserve(self, sums: Sequence[paddle.Tensor], std: float | Sequence[float]) -> Noise:
        """The stretch of the stream for one call of the mechanism over ``sums``, for kernels that add it themselves.

        The stretch is spent whether or not it is used: an error halfway must not lead to the same noise twice.
        """
        stds = self._check(sums, std)
        self._leave_parent_stream()
        sizes = [int(tensor.size) if scale > 0 else 0 for tensor, scale in zip(sums, stds)]
        return Noise(self._key, self._reserve(sizes), stds, [self.grid(scale) for scale in stds], self.draws)

    def standard_normal(self, shape: int | Sequence[int]) -> np.ndarray:
        """``float32`` standard normals of the given shape, from the same stream."""
        self._leave_parent_stream()
        dims = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        count = math.prod(dims)
        (block,) = self._reserve([count])
        return standard_normals(self._key, block, count, self.draws).reshape(dims)

    @property
    def draws(self) -> int:
        """Independent normals summed for one value of noise: 4 under the "sum" hardening, else 1."""
        return 4 if self._hardening == "sum" else 1

    def grid(self, std: float) -> float:
        """Spacing of the grid that noisy values are rounded to at this ``std``; 0 when they are not."""
        if self._hardening != "grid" or std == 0:
            return 0.0
        _, exponent = math.frexp(std)
        return math.ldexp(1.0, exponent - 1 - _GRID_BITS)

    def describe(self) -> dict[str, Any]:
        """What the ledger and reports say about the noise; holds no key material."""
        return {
            "kind": "chacha20-os" if self._secure else "seeded",
            "secure": self._secure,
            "hardening": self._hardening,
        }

    def __repr__(self) -> str:
        return f"NoiseGenerator({', '.join(f'{k}={v!r}' for k, v in self.describe().items())})"

    def __copy__(self) -> NoiseGenerator:
        twin = NoiseGenerator(hardening=self._hardening)
        if not self._secure:
            twin._secure = False
            self._copies += 1
            twin._set_key(hashlib.sha256(self._key.tobytes() + b"copy %d" % self._copies).digest())
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> NoiseGenerator:
        return copy.copy(self)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._secure:
            raise TypeError(
                "a seeded NoiseGenerator cannot be pickled, since every load would replay its noise; "
                "call NoiseGenerator.seeded(seed) where it is needed."
            )
        return _fresh, (self._hardening,)

    def _set_key(self, key: bytes) -> None:
        self._key = np.frombuffer(key, dtype="<u4").astype(np.uint32)
        self._counter = 0
        self._copies = 0
        self._process = (_forks, os.getpid())
        self._lock = threading.Lock()

    def _reserve(self, sizes: Sequence[int]) -> list[int]:
        """First blocks of stretches of the stream for tensors of these sizes; nobody gets them again."""
        with self._lock:
            blocks, counter = [], self._counter
            for size in sizes:
                blocks.append(counter)
                counter += rows_needed(size) * BLOCKS_PER_ROW
            if counter >= 2**64:
                raise PrivacyError("the noise stream of this key is used up (2^64 blocks); make a new NoiseGenerator.")
            self._counter = counter
        return blocks

    def _leave_parent_stream(self) -> None:
        if self._process != (_forks, os.getpid()):
            self._set_key(os.urandom(32))

    @staticmethod
    def _check(sums: Sequence[paddle.Tensor], std: float | Sequence[float]) -> list[float]:
        if isinstance(sums, paddle.Tensor):
            raise TypeError("sums must be a list of tensors, not one tensor; pass [tensor].")
        stds = list(std) if isinstance(std, (list, tuple, np.ndarray)) else [std] * len(sums)
        if len(stds) != len(sums):
            raise ValueError(f"std has {len(stds)} entries for {len(sums)} tensors; pass one number or one a tensor.")
        for index, (tensor, scale) in enumerate(zip(sums, stds)):
            if not isinstance(tensor, paddle.Tensor):
                raise TypeError(f"sums[{index}] must be a paddle.Tensor, not {type(tensor).__name__}.")
            if tensor.dtype not in (paddle.float32, paddle.float64):
                raise TypeError(f"sums[{index}] has dtype {tensor.dtype}; noise is added in float32 or float64.")
            if not (math.isfinite(scale) and scale >= 0):
                raise ValueError(f"std must be finite and >= 0, not {scale!r}.")
        if len({id(tensor) for tensor in sums}) != len(sums):
            raise ValueError("sums holds the same tensor twice; it would get noise twice.")
        return [float(scale) for scale in stds]


def _fresh(hardening: str) -> NoiseGenerator:
    return NoiseGenerator(hardening=hardening)
