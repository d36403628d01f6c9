"""Hooks on the user's layers: how they are installed, removed, kept out of copies, and switched off for a while."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor, nn

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture


class _Pause(threading.local):
    depth = 0
    # The capture whose hooks alone are in force, if any.
    only: Any = None


_pause = _Pause()


@contextmanager
def hooks_paused() -> Iterator[None]:
    """In this thread, layers run as if no private optimizer existed."""
    _pause.depth += 1
    try:
        yield
    finally:
        _pause.depth -= 1


@contextmanager
def hooks_only_of(capture: Capture) -> Iterator[None]:
    """In this thread, layers run as if `capture` were the only one on them."""
    before, _pause.only = _pause.only, capture
    try:
        yield
    finally:
        _pause.only = before


def paused() -> bool:
    """Whether :func:`hooks_paused` is in force in this thread."""
    return _pause.depth > 0


def _silent(capture: Capture) -> bool:
    return _pause.depth > 0 or _pause.only not in (None, capture)


class LayerHooks:
    """A pre-hook and a post-hook on one layer that serve one :class:`Capture`, held weakly.

    A deepcopy or pickle of the layer carries inert hooks: the copy belongs to no optimizer.
    """

    def __init__(self, capture: Capture, layer: nn.Layer, path: str):
        self._capture = weakref.ref(capture)
        self.path = path
        self._handles = [
            layer.register_forward_pre_hook(self._before, with_kwargs=True),  # type: ignore[arg-type]
            # always_call: what a pre-hook changed is put back even if the layer's forward raises. In front of the
            # user's own post-hooks: what these do to the output is no part of the layer.
            layer.register_forward_post_hook(
                self._after,  # type: ignore[arg-type]
                with_kwargs=True,
                always_call=True,
                prepend=True,
            ),
        ]

    def before(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Before the layer's forward; may return replaced inputs."""
        return None

    def after(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict, output: Any) -> Any:
        """After it, with `output` None where it raised; may return a replaced output."""
        return None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, layer: nn.Layer, args: tuple, kwargs: dict | None = None) -> tuple[tuple, dict] | None:
        capture = self._capture()
        # paddle.jit traces the layer, sometimes without passing keyword arguments; there is nothing to capture then.
        if capture is None or kwargs is None or not paddle.in_dynamic_mode() or _silent(capture):
            return None
        return self.before(capture, layer, args, kwargs)

    def _after(self, layer: nn.Layer, args: tuple, *kwargs_and_output: Any) -> Any:
        capture = self._capture()
        if capture is None or len(kwargs_and_output) == 1 or not paddle.in_dynamic_mode() or _silent(capture):
            return None
        kwargs, output = kwargs_and_output
        return self.after(capture, layer, args, kwargs, output)

    def __deepcopy__(self, memo: dict) -> InertHooks:
        return InertHooks()

    def __reduce__(self) -> tuple:
        return InertHooks, ()


class InertHooks:
    """What :class:`LayerHooks` become in a copy."""

    @staticmethod
    def _capture() -> None:
        """deepcopy gives the copy LayerHooks' own functions, bound to this object."""
        return None

    def _before(self, layer: nn.Layer, *inputs: Any) -> None:
        return None

    def _after(self, layer: nn.Layer, *inputs_and_output: Any) -> None:
        return None


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same nested lists, tuples and dicts with `change` applied to the tensors, in the order of :func:`tensors`."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        made = {name: map_tensors(change, value) for name, value in tree.items()}
        return made if type(tree) is dict else type(tree)(made)
    if isinstance(tree, list):
        return [map_tensors(change, value) for value in tree]
    if isinstance(tree, tuple):
        values = [map_tensors(change, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return tree
