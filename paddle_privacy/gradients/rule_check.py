"""Does a gradient rule say what autograd says?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_privacy.errors import PrivacyError
from paddle_privacy.gradients.hooks import tensors
from paddle_privacy.gradients.per_sample import batch_size, per_sample_gradients
from paddle_privacy.gradients.rules.recurrent import FUSED


@dataclass(frozen=True)
class GradRuleCheck:
    """The worst element of a comparison between a rule and one-by-one autograd.

    Attributes:
        ok: whether every element agrees.
        rtol: the tolerance, relative to the largest gradient element of all parameters.
        error: the largest difference, on the same scale.
        parameter, sample, element: where it is: parameter name, row of the batch, index into the parameter.
        found, expected: the two values there.
    """

    ok: bool
    rtol: float
    error: float
    parameter: str
    sample: int
    element: tuple[int, ...]
    found: float
    expected: float

    def __str__(self) -> str:
        place = f"{self.parameter}[{', '.join(map(str, self.element))}] of sample {self.sample}"
        verdict = "agrees with" if self.ok else "differs from"
        return (
            f"the rule {verdict} one-by-one autograd: worst at {place}, found {self.found:.8g}, expected "
            f"{self.expected:.8g}, relative error {self.error:.3g} (allowed {self.rtol:.3g})"
        )


def check_grad_rule(
    layer: nn.Layer, *inputs: Any, rtol: float | None = None, raise_on_error: bool = True
) -> GradRuleCheck:
    """Compares what the library captures for `layer` with one-by-one autograd, on a loss that weighs every output.

    Args:
        layer: the layer (or a whole model) with its parameters; run it in float64 for a sharp answer. Layers that draw
            random numbers in training mode should be in ``eval()`` mode.
        inputs: what it is called with, batch first, at least two rows that differ.
        rtol: allowed difference relative to the largest gradient element; by default 1e-9 where the parameters are
            float64, else 1e-4.
        raise_on_error: raise where the rule is wrong; otherwise only report.

    Returns:
        The worst element.

    Raises:
        PrivacyError: the rule disagrees with autograd (where `raise_on_error`).
        UnsupportedLayer: the layer has no rule and cannot be replayed.
        ValueError: the layer has no trainable parameter, or `inputs` holds no batch of at least two rows.
    """
    rows = batch_size(inputs)
    if rows < 2:
        raise ValueError("inputs must hold at least two samples, so that mixing them up would show; found one")
    names = {name: p for name, p in layer.named_parameters() if not p.stop_gradient}
    if not names:
        raise ValueError("layer has no trainable parameter (stop_gradient=False), so there is nothing to compare")

    def loss_fn(model: nn.Layer, *row: Any) -> Tensor:
        returned = model(*row)
        # A recurrent layer's final states are functions of the same steps as its output.
        used = returned[:1] if type(model) in FUSED else returned
        total = None
        for k, out in enumerate(x for x in tensors(used) if x.is_floating_point() and not x.stop_gradient):
            # The same weights for every sample.
            weights = np.random.RandomState(k).standard_normal([1, *out.shape[1:]])
            product = paddle.tanh(out) * paddle.to_tensor(weights, dtype=out.dtype)
            part = product.reshape([out.shape[0], -1]).sum(axis=1)
            total = part if total is None else total + part
        if total is None:
            raise ValueError("layer returns no floating-point tensor that depends on its parameters")
        return total

    found = per_sample_gradients(layer, loss_fn, *inputs)
    expected = per_sample_gradients(layer, loss_fn, *inputs, mode="microbatch")
    double = all(p.dtype == paddle.float64 for p in names.values())
    result = _worst(found, expected, (1e-9 if double else 1e-4) if rtol is None else rtol)
    if raise_on_error and not result.ok:
        raise PrivacyError(f"layer {type(layer).__name__}: {result}; correct the rule before training with it")
    return result


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> GradRuleCheck:
    scale = max(float(g.abs().max()) for g in expected.values()) + 1e-30
    worst: tuple[float, str, tuple[int, ...], float, float] | None = None
    for name, wanted in expected.items():
        a, b = found[name].numpy().astype("float64"), wanted.numpy().astype("float64")
        error = np.where(np.isfinite(a), np.abs(a - b), np.inf) / scale
        place = tuple(int(n) for n in np.unravel_index(int(error.argmax()), error.shape))
        if worst is None or error[place] > worst[0]:
            worst = (float(error[place]), name, place, float(a[place]), float(b[place]))
    assert worst is not None
    worst_error, name, at, a_there, b_there = worst
    return GradRuleCheck(worst_error <= rtol, rtol, worst_error, name, at[0], at[1:], a_there, b_there)
