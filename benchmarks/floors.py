"""The least that a private step can cost beyond the plain one: counted from the shapes of the model, not measured.

Forward pass and input gradients are the plain step's. Each weight gradient is the same products in another order: the
sum over all samples with the clipping factors inside (book-keeping), or one gradient a sample and then their sum. What
comes on top:

- the squared norm of each sample's gradient of each layer with inputs [T, d] and output gradients [T, p]: half of two
  Gram matrices, ½T²(d + p) multiply-adds (ghost norm); or, where the gradients are formed, writing d·p values a sample
  and reading them twice (for the norm, for the sum);
- for biases and norm scales, the same with p values a sample; for embeddings, reading the output gradients once more;
- noise for every trained value.

So the floor is one of what is *added*: where the package does a part of Paddle's own work more cheaply (the gradient of
an embedding, say), a step may lie below it.

Memory: with one bound over all layers no sample's factor is known before the last layer's gradient is, so until then a
layer must hold either its inputs and output gradients (T(d + p) values a sample) or the gradients themselves (d·p).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import paddle
from paddle import nn

FLOAT32 = 4
RECURRENT = (nn.SimpleRNN, nn.LSTM, nn.GRU)


@dataclass(frozen=True)
class Use:
    """What one sample does with the trained parameters of one layer.

    Args:
        kind: "outer" (a sum of outer products over positions), "rows" (rows picked from a table) or "values" (sums of
            output gradients or of their products with the input: biases, scales).
        positions: T. rows, cols: d and p of each group's gradient.
        inputs: values of one sample's input, shared equally among the layers that read the same tensor.
        trained: trained values, of the layer as a whole.
    """

    kind: str
    positions: int
    rows: int
    cols: int
    groups: int = 1
    inputs: float = 0.0
    trained: int = 0


@dataclass(frozen=True)
class Rates:
    """What the machine does a second: multiply-adds of a large product, bytes read or written, values of noise."""

    multiply_adds: float
    bytes: float
    noise: float


def ghost_multiply_adds(use: Use) -> float:
    """½T²(d + p): half of both symmetric Gram matrices of one sample."""
    return use.groups * 0.5 * use.positions**2 * (use.rows + use.cols)


def formed_bytes(use: Use) -> float:
    """One sample's gradient written once and read twice."""
    return 3.0 * FLOAT32 * use.groups * use.rows * use.cols


def extra_seconds(use: Use, batch: int, rates: Rates) -> float:
    """The least that the norms of `batch` samples cost in one layer."""
    if use.kind == "rows":
        return batch * use.positions * use.cols * FLOAT32 / rates.bytes
    formed = formed_bytes(use) / rates.bytes
    if use.kind == "values":
        return batch * formed
    return batch * min(formed, ghost_multiply_adds(use) / rates.multiply_adds)


def held_bytes(use: Use, batch: int) -> float:
    """The least that one layer must hold until the last layer's gradient has arrived."""
    formed = use.groups * use.rows * use.cols
    if use.kind == "values":
        return FLOAT32 * batch * formed
    if use.kind == "rows":
        return FLOAT32 * batch * use.positions * use.cols
    factors = use.inputs + use.groups * use.positions * use.cols
    return FLOAT32 * batch * min(formed, factors)


def floor_seconds(uses: Iterable[Use], batch: int, rates: Rates) -> float:
    """Seconds that a private step of `batch` samples must take beyond the plain step."""
    uses = list(uses)
    return sum(extra_seconds(use, batch, rates) for use in uses) + sum(use.trained for use in uses) / rates.noise


def floor_bytes(uses: Iterable[Use], batch: int, parameters: int, forward_peak: float, early: bool) -> float:
    """Bytes that a private step must have allocated at its peak.

    Args:
        parameters: values in the model, trained or not.
        forward_peak: peak of the forward pass alone, which is the plain step's as well.
        early: each layer is clipped by itself as soon as its gradient is there, so nothing is held.
    """
    held = 0.0 if early else sum(held_bytes(use, batch) for use in uses)
    return max(forward_peak, FLOAT32 * parameters + held)


def uses_of(model: nn.Layer, loss: Callable[[nn.Layer], paddle.Tensor]) -> list[Use]:
    """What each layer with trained parameters does, seen in one forward pass.

    Raises:
        TypeError: a kind of layer that this file cannot count.
    """
    seen: list[tuple[nn.Layer, paddle.Tensor, paddle.Tensor]] = []

    def note(layer: nn.Layer, inputs: tuple, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        seen.append((layer, inputs[0], first))

    owners = [sub for sub in model.sublayers(include_self=True) if any(map(_trained, sub._parameters.values()))]
    hooks = [owner.register_forward_post_hook(note) for owner in owners if not isinstance(owner, RECURRENT)]
    hooks += [sub.register_forward_post_hook(note) for sub in model.sublayers() if isinstance(sub, RECURRENT)]
    with paddle.no_grad():
        loss(model)
    for hook in hooks:
        hook.remove()
    # Only what multiplies its input by a trained weight needs it later.
    readers = [id(x) for layer, x, _ in seen if _trained(getattr(layer, "weight", None))]
    return [
        use for layer, x, y in seen for use in _uses(layer, x, y, x.size / x.shape[0] / max(1, readers.count(id(x))))
    ]


def _trained(parameter: paddle.Tensor | None) -> bool:
    return parameter is not None and not parameter.stop_gradient


def _uses(layer: nn.Layer, x: paddle.Tensor, y: paddle.Tensor, inputs: float) -> list[Use]:
    if isinstance(layer, RECURRENT):
        return _recurrent(layer, x)
    others = [name for name, p in layer._parameters.items() if _trained(p) and name not in ("weight", "bias")]
    if others:
        raise TypeError(f"floors of {type(layer).__name__} are not counted: it trains {others}")
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    found = []
    if _trained(bias):
        found.append(Use("values", 1, 1, bias.size, trained=bias.size))
    if not _trained(weight):
        return found
    size = weight.size
    if isinstance(layer, nn.Linear):
        positions = math.prod(x.shape[1:-1])
        found.append(Use("outer", positions, *weight.shape, inputs=inputs, trained=size))
    elif isinstance(layer, nn.Conv2D):
        out, groups = weight.shape[0], layer._groups
        positions = math.prod(y.shape[2:])
        rows = math.prod(weight.shape[1:])
        found.append(Use("outer", positions, rows, out // groups, groups, inputs=inputs, trained=size))
    elif isinstance(layer, nn.Embedding):
        found.append(Use("rows", math.prod(x.shape[1:]), *weight.shape, trained=size))
    elif isinstance(layer, (nn.LayerNorm, nn.GroupNorm)):
        found.append(Use("values", 1, 1, size, trained=size))
    else:
        raise TypeError(f"floors of {type(layer).__name__} are not counted")
    return found


def _recurrent(layer: nn.Layer, x: paddle.Tensor) -> list[Use]:
    steps = x.shape[0 if layer.time_major else 1]
    found = []
    for parameter in layer.parameters():
        if not _trained(parameter):
            continue
        if parameter.ndim == 2:
            cols, rows = parameter.shape
            found.append(Use("outer", steps, rows, cols, inputs=steps * rows, trained=parameter.size))
        else:
            found.append(Use("values", 1, 1, parameter.size, trained=parameter.size))
    return found
