"""Finds the layers that own an optimizer's parameters, and names them by their path in the model.

A Paddle optimizer is given parameters only. The layers are found among the live objects of the process, once at
construction (a scan of the garbage collector's list, tens of milliseconds), or below `model` where it is given.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field

from paddle import Tensor, nn

from paddle_privacy.errors import PrivacyError


@dataclass
class Owner:
    """A layer with the managed parameters that it holds itself (not those of its sublayers)."""

    layer: nn.Layer
    path: str
    parameters: dict[str, Tensor] = field(default_factory=dict)
    root: nn.Layer | None = None


@dataclass
class Located:
    """Where the managed parameters live: their owners, the outermost models, and a readable name for each."""

    owners: list[Owner]
    roots: list[nn.Layer]
    names: dict[int, str]


def _live_layers() -> list[nn.Layer]:
    # type(), not isinstance(): lazy proxies among the live objects import things when asked for __class__.
    return [obj for obj in gc.get_objects() if issubclass(type(obj), nn.Layer)]


def locate(parameters: Iterable[Tensor], model: nn.Layer | None = None) -> Located:
    """Finds the owners of `parameters`.

    Raises:
        PrivacyError: a parameter belongs to no layer; its gradient could not be captured sample by sample.
    """
    managed = {id(p): p for p in parameters}
    candidates = [model, *model.sublayers()] if model is not None else _live_layers()
    direct: dict[int, Owner] = {}
    for layer in candidates:
        held = {name: p for name, p in layer._parameters.items() if p is not None and id(p) in managed}
        if held and id(layer) not in direct:
            direct[id(layer)] = Owner(layer, type(layer).__name__, held)

    roots = [model] if model is not None else _outermost(candidates, set(direct))
    names: dict[int, str] = {}
    for root in roots:
        for path, layer in root.named_sublayers(include_self=True):
            owner = direct.get(id(layer))
            if owner is None:
                continue
            owner.path, owner.root = path or type(root).__name__, root
            for name, parameter in owner.parameters.items():
                names.setdefault(id(parameter), f"{path}.{name}" if path else name)
    missing = [p.name for key, p in managed.items() if key not in names]
    if missing:
        raise PrivacyError(
            f"parameters {missing} belong to no layer{' of the model' if model is not None else ''}, so their "
            "per-sample gradients cannot be captured; register them in a paddle.nn.Layer that uses them in its forward"
        )
    return Located(list(direct.values()), roots, names)


def _outermost(layers: list[nn.Layer], owning: set[int]) -> list[nn.Layer]:
    """Layers with an owner at or below them that are nobody's sublayer; the smallest such set in creation order."""
    below = {id(layer): {id(sub) for sub in layer.sublayers(include_self=True)} for layer in layers}
    relevant = [layer for layer in layers if below[id(layer)] & owning]
    inner = set().union(*(below[id(layer)] - {id(layer)} for layer in relevant)) if relevant else set()
    return [layer for layer in relevant if id(layer) not in inner]
