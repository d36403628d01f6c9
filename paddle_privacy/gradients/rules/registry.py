"""Which rule gives the per-sample gradients of which layer type.

A rule is a pure function ``rule(layer, inputs, output_grad)`` that returns, for each parameter name of the layer,
a :class:`~paddle_privacy.gradients.factors.Factor`, a formed ``[B, *shape]`` tensor, or a function of no arguments
that makes one (so that nothing is computed for a frozen parameter). `inputs` is the tuple of the layer's positional
inputs; `output_grad` is ∂L/∂output, batch first, for the loss as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Callable, Union

from paddle import Tensor, nn

from paddle_privacy.gradients.factors import Factor

Lazy = Union[Factor, Tensor, Callable[[], Union[Factor, Tensor]]]
Rule = Callable[[Any, tuple, Any], Mapping[str, Lazy]]


@dataclass(frozen=True)
class GradRule:
    """A rule and what it needs: parameters in `input_free` can do without the recorded input."""

    factors: Rule
    input_free: frozenset[str]
    shadowed: frozenset[str]
    many_outputs: bool
    lookup: bool
    refuses: Callable[[Any], str | None]
    unless: Callable[[Any], bool]


_by_type: dict[type, GradRule] = {}
_by_name: dict[str, GradRule] = {}


def _never(layer: nn.Layer) -> str | None:
    return None


def register_grad_rule(
    *layer_types: type | str,
    input_free: Iterable[str] = (),
    shadowed: Iterable[str] = (),
    many_outputs: bool = False,
    lookup: bool = False,
    refuses: Callable[[Any], str | None] = _never,
    unless: Callable[[Any], bool] = lambda layer: False,
) -> Callable[[Rule], Rule]:
    """Decorator that teaches the library a layer type.

    Args:
        layer_types: layer classes, or ``"module.Class"`` for classes of packages that need not be installed. A rule
            holds for exactly these classes, not for subclasses: a subclass may compute something else.
        input_free: parameters whose gradients follow from the output gradient alone (biases); when only these are
            trained, the layer's input is not kept.
        shadowed: parameters that must not be frozen while the layer runs, because its kernel's input gradient depends
            on whether the parameter wants one. They are computed with a stand-in whose gradient is thrown away.
        many_outputs: the layer returns several tensors; `output_grad` is then a tuple with one place for each
            distinct tensor in the order in which they are returned, all but one of them ``None``, and the rule is
            called once for each gradient that arrives.
        lookup: the layer looks its inputs up in a table, so that inputs without a batch axis (positions, [T]) give
            outputs without one.
        refuses: ``refuses(layer)`` returns why this instance cannot be handled (and what to do), or ``None``.
        unless: ``unless(layer)`` is true for instances that the rule does not describe; they are treated like a layer
            without a rule (by products, expansion or replay).

    The rule itself is trusted: check it with :func:`paddle_privacy.check_grad_rule`.
    """

    def register(rule: Rule) -> Rule:
        entry = GradRule(rule, frozenset(input_free), frozenset(shadowed), many_outputs, lookup, refuses, unless)
        for layer_type in layer_types:
            if isinstance(layer_type, str):
                _by_name[layer_type] = entry
            elif isinstance(layer_type, type) and issubclass(layer_type, nn.Layer):
                _by_type[layer_type] = entry
            else:
                raise TypeError(f"layer_types must be paddle.nn.Layer classes or dotted names, found {layer_type!r}")
        return rule

    return register


def refusal(layer: nn.Layer) -> str | None:
    """Why a layer with trained parameters cannot be handled as it is (and what to do), or ``None``."""
    spectral = any(type(hook).__name__ == "SpectralNorm" for hook in layer._forward_pre_hooks.values())
    if spectral or isinstance(layer, nn.SpectralNorm):
        return (
            "spectral normalisation runs a power iteration in every forward, so that none can be repeated and its "
            "gradients cannot be told apart sample by sample; build the model without it, or with weight_norm"
        )
    rule = find_rule(layer)
    return None if rule is None else rule.refuses(layer)


# Hooks of paddle.nn.utils that compute a layer's weight from other parameters before its forward.
_REPARAMETRISING = ("WeightNorm", "SpectralNorm")


def find_rule(layer: nn.Layer) -> GradRule | None:
    """The rule for exactly this layer's class, or ``None`` where none describes this instance."""
    if any(type(hook).__name__ in _REPARAMETRISING for hook in layer._forward_pre_hooks.values()):
        return None
    cls = type(layer)
    rule = _by_type.get(cls) or _by_name.get(class_name(cls))
    return None if rule is None or rule.unless(layer) else rule


def class_name(cls: type) -> str:
    """``"module.Class"``."""
    return f"{cls.__module__}.{cls.__qualname__}"
