"""Norms to clip factors: how much of each sample's gradient enters the sum, and what bounds it.

A clipping answers four questions, so that no other part of the library has to assume the answers:

- :meth:`Clipping.blocks`: which parameters are bounded together;
- :meth:`Clipping.factors`: cᵢ for each sample and block, from the norms;
- :attr:`Clipping.sensitivity`: the L2 norm that one sample's whole contribution Σ_blocks cᵢGᵢ can reach. The noise
  step asks for it; it is never typed twice;
- :meth:`Clipping.mechanism`: the event that one noisy step is, for the accountant.

All bounds are for adding or removing one sample (replacing one: twice as much).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor

from paddle_privacy.schedules import Schedule

if TYPE_CHECKING:
    from paddle_privacy.accounting.events import Event


class Clipping(ABC):
    """Base of all clippings."""

    name: str
    # One bound, or a list of bounds for per-layer clipping.
    clip_norm: Any
    # Whether a layer's factors follow from its own norms, so that it can be summed before the others are known.
    by_layer = False
    _schedule: Schedule | None = None

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """L2 bound on what adding or removing one sample changes in the sum."""

    @abstractmethod
    def factors(self, squared_norms: Tensor) -> Tensor:
        """Clip factors.

        Args:
            squared_norms: [blocks, B], ‖Gᵢ‖² of each block; float32 or float64, finite.

        Returns:
            [blocks, B], such that Σ_blocks (cᵢ‖Gᵢ‖)² ≤ sensitivity².
        """

    def blocks(self, layer_paths: Sequence[str]) -> list[int]:
        """The block of each parameter, given the path of the layer that owns it. Here: one block."""
        return [0] * len(layer_paths)

    def mechanism(self, noise_multiplier: float) -> Event:
        """What one noisy step releases about the samples in it."""
        from paddle_privacy.accounting.events import Gaussian

        return Gaussian(noise_multiplier)

    def after_step(self, norms: Tensor, batch_size: float, noised: Callable[[float, float], float]) -> None:
        """Called once a step with the norms [rows] of the samples that took part; may release a noisy statistic.

        ``noised(value, std)`` is `value` plus N(0, std²); under data parallelism the values of all ranks are added,
        each of its own rows.
        """
        return None

    def advance(self, steps: int) -> None:
        """`steps` steps have been taken: a scheduled bound moves to its next value. Only between updates."""
        if self._schedule is not None:
            self.clip_norm = positive("clip_norm", self._schedule(steps))

    @property
    def schedule_in_words(self) -> str | None:
        """The schedule of the bound, for reports; ``None`` where it has none."""
        return None if self._schedule is None else repr(self._schedule)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "clip_norm": self.clip_norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where the state belongs to another clipping."""
        if state.get("name") != self.name:
            raise ValueError(
                f"the saved state is of clipping {state.get('name')!r}, this optimizer clips {self.name!r}; "
                "build it with the clipping it was saved with"
            )
        self.clip_norm = state["clip_norm"]

    def __init__(self, clip_norm: float | Schedule):
        if isinstance(clip_norm, Schedule):
            self._schedule, clip_norm = clip_norm, clip_norm(0)
        self.clip_norm = positive("clip_norm", clip_norm)


class FlatClipping(Clipping):
    """cᵢ = min(1, C/‖gᵢ‖) (Abadi et al. 2016, "Deep Learning with Differential Privacy", Algorithm 1)."""

    name = "flat"

    @property
    def sensitivity(self) -> float:
        return self.clip_norm

    def factors(self, squared_norms: Tensor) -> Tensor:
        return _bounded(squared_norms, self.clip_norm)


class PerLayerClipping(Clipping):
    """cᵢ = min(1, C_l/‖gᵢ,l‖) in each layer l; sensitivity √Σ C_l² (McMahan et al. 2018, §"per-layer clipping").

    Args:
        clip_norm: one bound C, split evenly (C_l = C/√L), or a list of L bounds in the order of the layers.
    """

    name = "per_layer"
    by_layer = True

    def __init__(self, clip_norm: float | Sequence[float]):
        if isinstance(clip_norm, (list, tuple)):
            self.clip_norm = [positive("clip_norm", c) for c in clip_norm]
            if not self.clip_norm:
                raise ValueError("clip_norm must be a positive number or a list of one bound per layer, found []")
        else:
            super().__init__(clip_norm)  # type: ignore[arg-type]

    @property
    def sensitivity(self) -> float:
        return math.hypot(*self.clip_norm) if isinstance(self.clip_norm, list) else self.clip_norm

    def blocks(self, layer_paths: Sequence[str]) -> list[int]:
        layers = list(dict.fromkeys(layer_paths))
        if isinstance(self.clip_norm, list) and len(self.clip_norm) != len(layers):
            raise ValueError(
                f"clip_norm lists {len(self.clip_norm)} bounds for {len(layers)} layers with parameters: {layers}"
            )
        return [layers.index(path) for path in layer_paths]

    def factors(self, squared_norms: Tensor) -> Tensor:
        layers = squared_norms.shape[0]
        if isinstance(self.clip_norm, list):
            bounds = paddle.to_tensor(self.clip_norm, dtype=squared_norms.dtype).reshape([layers, 1])
        else:
            bounds = paddle.full([1, 1], self.clip_norm / math.sqrt(layers), dtype=squared_norms.dtype)
        return _bounded(squared_norms, bounds)


class AutomaticClipping(Clipping):
    """AUTO-S: cᵢ = C/(‖gᵢ‖ + γ), no threshold to tune (Bu et al. 2023, "Automatic Clipping", arXiv:2206.07136).

    C only scales the update and the noise alike; with Adam it changes nothing. The sensitivity is C.
    """

    name = "automatic"

    def __init__(self, clip_norm: float = 1.0, *, gamma: float = 0.01):
        super().__init__(clip_norm)
        self.gamma = positive("gamma", gamma)

    @property
    def sensitivity(self) -> float:
        return self.clip_norm

    def factors(self, squared_norms: Tensor) -> Tensor:
        return self.clip_norm / (squared_norms.sqrt() + self.gamma)


class PSACClipping(Clipping):
    """cᵢ = C/(‖gᵢ‖ + r/(‖gᵢ‖ + r)): per-sample adaptive weights that do not blow up small gradients.

    Xia et al. 2023, "Differentially Private Learning with Per-Sample Adaptive Clipping", arXiv:2212.00328, eq. (6).
    The sensitivity is C.
    """

    name = "psac"

    def __init__(self, clip_norm: float = 1.0, *, r: float = 0.1):
        super().__init__(clip_norm)
        self.r = positive("r", r)

    @property
    def sensitivity(self) -> float:
        return self.clip_norm

    def factors(self, squared_norms: Tensor) -> Tensor:
        norms = squared_norms.sqrt()
        return self.clip_norm / (norms + self.r / (norms + self.r))


class AdaptiveClipping(Clipping):
    """Flat clipping whose bound follows a quantile of the norms (Andrew et al. 2021, arXiv:1905.03871).

    After each step the fraction of samples with ‖gᵢ‖ ≤ C is released with Gaussian noise on the count
    (sensitivity ½ around its centre) and C ← C·exp(−η(b̃ − γ)). The accountant is charged for the count: see
    :meth:`mechanism`.

    Args:
        clip_norm: C to start from.
        quantile: γ, the fraction of gradients that should be below C.
        learning_rate: η.
        count_noise: σ_b, standard deviation of the noise on the count, in samples; default batch_size/20.
    """

    name = "adaptive"

    def __init__(
        self,
        clip_norm: float = 1.0,
        *,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
        count_noise: float | None = None,
    ):
        if isinstance(clip_norm, Schedule):
            raise ValueError(
                "clip_norm of adaptive clipping moves by itself; give the number to start from, not a schedule"
            )
        super().__init__(clip_norm)
        if not 0 < quantile < 1:
            raise ValueError(f"quantile must be in (0, 1), found {quantile!r}")
        self.quantile, self.learning_rate = quantile, positive("learning_rate", learning_rate)
        self.count_noise = None if count_noise is None else positive("count_noise", count_noise)

    @property
    def sensitivity(self) -> float:
        return self.clip_norm

    def factors(self, squared_norms: Tensor) -> Tensor:
        return _bounded(squared_norms, self.clip_norm)

    def mechanism(self, noise_multiplier: float) -> Event:
        from paddle_privacy.accounting.events import Composed, Gaussian

        if self.count_noise is None:
            raise ValueError("count_noise is not known before batch_size is; the optimizer sets it")
        return Composed((Gaussian(noise_multiplier), Gaussian(2.0 * self.count_noise)))

    def after_step(self, norms: Tensor, batch_size: float, noised: Callable[[float, float], float]) -> None:
        assert self.count_noise is not None
        centred = float((norms <= self.clip_norm).astype("float64").sum()) - 0.5 * norms.shape[0]
        noisy = noised(centred, self.count_noise)
        # Divided by the public batch size: the realised one is secret.
        fraction = noisy / batch_size + 0.5
        self.clip_norm *= math.exp(-self.learning_rate * (fraction - self.quantile))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count_noise": self.count_noise}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.count_noise = state["count_noise"]


CLIPPINGS: dict[str, type[Clipping]] = {
    cls.name: cls for cls in (FlatClipping, PerLayerClipping, AutomaticClipping, PSACClipping, AdaptiveClipping)
}


def make_clipping(clipping: str | Clipping, clip_norm: Any, batch_size: float) -> Clipping:
    """The clipping named by `clipping`, or `clipping` itself where it is one (then `clip_norm` must be left out)."""
    if isinstance(clipping, Clipping):
        if clip_norm is not None and clip_norm != clipping.clip_norm:
            raise ValueError(
                f"clip_norm={clip_norm!r} contradicts the bound {clipping.clip_norm!r} of {type(clipping).__name__}; "
                "give the bound once"
            )
        made = clipping
    elif isinstance(clipping, str) and clipping in CLIPPINGS:
        if clip_norm is None:
            raise ValueError("clip_norm is missing: the bound C on each sample's gradient norm, a positive number")
        made = CLIPPINGS[clipping](clip_norm)
    else:
        raise ValueError(f"clipping must be one of {sorted(CLIPPINGS)} or a Clipping, found {clipping!r}")
    if isinstance(made, AdaptiveClipping) and made.count_noise is None:
        made.count_noise = batch_size / 20.0
    return made


def positive(name: str, value: Any) -> float:
    """`value` as a float if it is a number > 0 (infinity allowed), else TypeError or ValueError naming it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a positive number, found {value!r}")
    if not float(value) > 0:
        raise ValueError(f"{name} must be greater than 0, found {value!r}")
    return float(value)


def _bounded(squared_norms: Tensor, bound: Any) -> Tensor:
    """min(1, C/‖g‖), with 1 at ‖g‖ = 0."""
    if isinstance(bound, float) and math.isinf(bound):
        return paddle.ones_like(squared_norms)
    norms = squared_norms.sqrt()
    factors = bound / norms.clip(min=1e-30)
    return factors.clip(max=1.0)
