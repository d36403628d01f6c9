"""Which layers of a model cannot be trained privately, and what to put in their place.

A layer that computes anything over the batch (BatchNorm) makes one sample's gradient depend on the others, so no
clipping bounds what one row can change. A layer whose weight is recomputed before every call (spectral or weight
norm) uses its parameter outside what is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import paddle
from paddle import nn
from paddle.nn.utils import remove_weight_norm
from paddle.nn.utils.spectral_norm_hook import SpectralNorm as SpectralNormHook
from paddle.nn.utils.weight_norm_hook import WeightNorm as WeightNormHook

from paddle_privacy.errors import UnsupportedLayer

_BatchNormBase = nn.layer.norm._BatchNormBase
_InstanceNormBase = nn.layer.norm._InstanceNormBase
_CHANNELS_LAST = {"NLC", "NHWC", "NDHWC"}


@dataclass(frozen=True)
class Problem:
    """A layer that stands in the way of private training.

    Attributes:
        path: where the layer is in the model (the class name for the model itself).
        layer: its class name.
        reason: what is wrong with it.
        change: what :meth:`ModuleValidator.fix` does about it, or None where a person has to decide.
        advice: what that person can do; empty where ``change`` says it.
    """

    path: str
    layer: str
    reason: str
    change: str | None = None
    advice: str = ""

    def __str__(self) -> str:
        what = f"fix: {self.change}" if self.change else self.advice
        return f"layer '{self.path}' ({self.layer}): {self.reason}; {what}"


class ModuleValidator:
    """Finds what cannot be trained privately in a model, and replaces what has a private counterpart."""

    @classmethod
    def validate(cls, module: nn.Layer, *, strict: bool = False) -> list[Problem]:
        """All problems of ``module``, in the order of its layers; empty if there are none.

        Args:
            strict: raise instead of returning them.

        Raises:
            UnsupportedLayer: with ``strict``, one error that lists them all.
            TypeError: ``module`` is not a ``paddle.nn.Layer``.
        """
        problems = [problem for problem, _ in _findings(module, "group")]
        if strict and problems:
            lines = "\n  ".join(map(str, problems))
            raise UnsupportedLayer(
                f"the model has {len(problems)} layer(s) that cannot be trained privately:\n  {lines}"
            )
        return problems

    @classmethod
    def is_valid(cls, module: nn.Layer) -> bool:
        """Whether :meth:`validate` finds nothing."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Layer, *, replacement: str = "group", dry_run: bool = False) -> nn.Layer:
        """Replace what has a private counterpart, in place; returns ``module`` (a new layer if it is itself replaced).

        BatchNorm and SyncBatchNorm become GroupNorm over the same ``Parameter`` objects, so weights, state-dict keys
        of the affine parameters, and optimizers built before stay good; running statistics go. Spectral and weight
        norm are folded into the weight.

        Args:
            replacement: ``"group"`` (up to 32 groups) or ``"instance"`` (a group for each channel).
            dry_run: print what would change and change nothing.

        Problems without a counterpart are left; :meth:`validate` lists them.
        """
        if replacement not in ("group", "instance"):
            raise ValueError(f'replacement must be "group" or "instance", got {replacement!r}')
        findings = _findings(module, replacement)
        if dry_run:
            for problem, _ in findings:
                print(problem)
            return module
        replaced: dict[int, nn.Layer] = {}
        for _, (layer, change) in findings:
            if change is not None and id(layer) not in replaced:
                replaced[id(layer)] = change(layer)
        if not replaced:
            return module
        for parent in module.sublayers(include_self=True):
            for name, child in list(parent._sub_layers.items()):
                new = None if child is None else replaced.get(id(child))
                if new is not None and new is not child:
                    parent._sub_layers[name] = new
        return replaced.get(id(module), module)


_Change = Callable[[nn.Layer], nn.Layer]


def _findings(module: nn.Layer, replacement: str) -> list[tuple[Problem, tuple[nn.Layer, _Change | None]]]:
    if not isinstance(module, nn.Layer):
        raise TypeError(f"module must be a paddle.nn.Layer, got {type(module).__name__}")
    found = []
    for path, layer in module.named_sublayers(include_self=True):
        path = path or type(module).__name__
        if module.training and not layer.training and isinstance(layer, (_BatchNormBase, nn.BatchNorm)):
            continue  # kept in eval() mode on purpose; the optimizer refuses it should that change
        for problem, change in _inspect(path, layer, replacement):
            found.append((problem, (layer, change)))
    return found


def _inspect(path: str, layer: nn.Layer, replacement: str) -> list[tuple[Problem, _Change | None]]:
    kind = type(layer).__name__
    if isinstance(layer, (_BatchNormBase, nn.BatchNorm)):
        return _inspect_batch_norm(path, layer, replacement)
    if isinstance(layer, nn.SpectralNorm):
        reason = "normalises a weight that is then used outside the layer that owns it"
        advice = "drop it and call the owning layer itself, or train without this weight (stop_gradient=True)"
        return [(Problem(path, kind, reason, advice=advice), None)]
    if isinstance(layer, _InstanceNormBase) and layer._buffers:
        reason = f"keeps statistics of the data in {sorted(layer._buffers)}, which are released with no noise"
        return [(Problem(path, kind, reason, advice="use paddle.nn.InstanceNorm, which keeps none"), None)]
    hooks = list(layer._forward_pre_hooks.values())
    if any(isinstance(hook, SpectralNormHook) for hook in hooks):
        reason = "spectral_norm recomputes its weight before every call, outside what is captured"
        return [(Problem(path, kind, reason, "fold the normalised weight into the layer"), _fold_spectral_norm)]
    if any(isinstance(hook, WeightNormHook) for hook in hooks):
        reason = "weight_norm recomputes its weight before every call, outside what is captured"
        change = "fold the weight into the layer (its parameters change: build the optimizer afterwards)"
        return [(Problem(path, kind, reason, change), _fold_weight_norm)]
    return _inspect_rule(path, layer)


def _inspect_rule(path: str, layer: nn.Layer) -> list[tuple[Problem, _Change | None]]:
    """What the layer's own gradient rule refuses. Layers without a rule are told by their first batch."""
    from paddle_privacy.gradients.rules import find_rule

    trained = any(p is not None and not p.stop_gradient for p in layer._parameters.values())
    rule = find_rule(layer) if trained else None
    refused = rule.refuses(layer) if rule is not None else None
    if refused is None:
        return []
    reason, _, advice = refused.partition("; ")
    advice = advice or "freeze it (stop_gradient=True)"
    return [(Problem(path, type(layer).__name__, reason, advice=advice), None)]


def _inspect_batch_norm(path: str, layer: nn.Layer, replacement: str) -> list[tuple[Problem, _Change | None]]:
    kind = type(layer).__name__
    if getattr(layer, "_use_global_stats", False) and not isinstance(layer, nn.SyncBatchNorm):
        return []
    reason = "in training mode mixes the samples of a batch, and keeps un-noised statistics of them"
    if getattr(layer, "_act", None) is not None:
        advice = f"move its activation {layer._act!r} into a layer of its own, then fix it"
        return [(Problem(path, kind, reason, advice=advice), None)]
    channels = int(layer._mean.shape[0])
    flat = isinstance(layer, nn.BatchNorm1D)
    if flat and channels == 1:
        advice = "one channel of a [N, 1] input has nothing within a sample to normalise over: remove the layer"
        return [(Problem(path, kind, reason, advice=advice), None)]
    groups = channels if replacement == "instance" and not flat else _groups(channels, 8 if flat else 2)
    change = f"GroupNorm(num_groups={groups}, num_channels={channels}) with the same weights"
    return [(Problem(path, kind, reason, change), lambda old: _as_group_norm(old, groups, channels))]


def _groups(channels: int, least: int) -> int:
    """The most groups, at most 32 (Wu & He 2018), that divide ``channels`` with at least ``least`` channels in each.

    A group of one channel has nothing to average over where the input has no positions, and would always give zero.
    """
    return max((g for g in range(1, 33) if channels % g == 0 and channels // g >= least), default=1)


def _as_group_norm(old: nn.Layer, groups: int, channels: int) -> nn.Layer:
    layout = getattr(old, "_data_format", None) or getattr(old, "_data_layout", "NCHW")
    new = nn.GroupNorm(
        groups,
        channels,
        epsilon=old._epsilon,
        weight_attr=False,
        bias_attr=False,
        data_format="NHWC" if layout in _CHANNELS_LAST else "NCHW",
    )
    new._dtype = old._mean.dtype
    # The same Parameter objects, frozen or not: an optimizer that holds them goes on holding the model's own.
    for name in ("weight", "bias"):
        parameter = getattr(old, name, None)
        if parameter is not None:
            setattr(new, name, parameter)
    new.training = old.training
    return new


def _fold_spectral_norm(layer: nn.Layer) -> nn.Layer:
    for key, hook in list(layer._forward_pre_hooks.items()):
        if not isinstance(hook, SpectralNormHook):
            continue
        with paddle.no_grad():
            weight = hook.compute_weight(layer, do_power_iteration=False)
        original = layer._parameters.pop(hook.name + "_orig")
        original.set_value(weight)
        for suffix in ("_u", "_v"):
            layer._buffers.pop(hook.name + suffix, None)
            layer._parameters.pop(hook.name + suffix, None)
        layer.__dict__.pop(hook.name, None)
        layer._parameters[hook.name] = original
        del layer._forward_pre_hooks[key]
    return layer


def _fold_weight_norm(layer: nn.Layer) -> nn.Layer:
    hooks: list[object] = list(layer._forward_pre_hooks.values())
    for hook in hooks:
        if isinstance(hook, WeightNormHook):
            remove_weight_norm(layer, hook.name)
    return layer
