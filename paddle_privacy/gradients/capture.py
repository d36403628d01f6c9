"""Captures, during the user's own forward and backward, what per-sample gradients are made of.

For each layer that owns a managed parameter a :class:`~paddle_privacy.gradients.tap.Tap` sees its input `a` in the
forward pass and its output gradient `g` in the backward pass. While the layer's forward runs, its parameters carry
``stop_gradient=True``: Paddle then never computes their weight gradients, which removes a third of the backward's work
and, better, turns any *other* use of a managed parameter into a filled ``.grad`` that :meth:`Capture.close` refuses.
So every step proves that the taps saw every use.

One ``backward()`` is one :class:`Group` of samples. Hooks never raise (Paddle would turn the exception into an OSError
or SystemError): what goes wrong is kept, and raised, typed, by :meth:`Capture.raise_failure`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import paddle
from paddle import Tensor, nn

from paddle_privacy.errors import PrivacyError, UnsupportedLayer
from paddle_privacy.gradients.factors import Factor
from paddle_privacy.gradients.guard import MixingGuard, mixes_samples
from paddle_privacy.gradients.hooks import BatchProbe, LayerHooks
from paddle_privacy.gradients.locate import Located
from paddle_privacy.gradients.rules import find_rule
from paddle_privacy.gradients.tap import Tap


class Group:
    """The samples of one backward pass: for each parameter (by id) the factors of all its uses."""

    def __init__(self) -> None:
        self.batch: int | None = None
        self.first_path = ""
        self.factors: dict[int, list[Factor]] = {}
        # A nested backward (recompute) ended; whether the outer one did too is known only at the next event.
        self.outer_may_run = False

    def add(self, key: int, factor: Factor, path: str) -> None:
        if self.batch is None:
            self.batch, self.first_path = factor.batch, path
        elif factor.batch != self.batch:
            raise PrivacyError(
                f"layer '{path}' saw {factor.batch} rows on its first axis where layer '{self.first_path}' saw "
                f"{self.batch} in the same backward(); the first axis of every activation must be the batch"
            )
        self.factors.setdefault(key, []).append(factor)


class Capture:
    """All the taps of one optimizer, and the group of samples whose backward is running.

    Args:
        located: the layers that own the managed parameters.
        on_group: called with each finished :class:`Group`.

    Raises:
        UnsupportedLayer: a layer with a trainable managed parameter has no gradient rule.
    """

    def __init__(self, located: Located, on_group: Callable[[Group], None]):
        self.located, self.on_group = located, on_group
        self.parameters = {id(p): p for owner in located.owners for p in owner.parameters.values()}
        self.group: Group | None = None
        self.running_rows: list[int | None] = []
        # Whether the `.grad`s that are filled were put there by step(), for the user to look at.
        self.published = False
        self._failure: PrivacyError | None = None
        self._final_hook_pending = False
        self._suppressed: dict[int, int] = {}
        self._replaced: list[tuple[nn.Layer, str, Tensor]] = []
        self._hooks = self._install()

    def _install(self) -> list[LayerHooks]:
        ruled = []
        for owner in self.located.owners:
            rule = find_rule(owner.layer)
            trained = any(not p.stop_gradient for p in owner.parameters.values())
            if rule is not None:
                reason = rule.refuses(owner.layer)
                ruled.append((owner, rule))
            else:
                reason = (
                    f"no gradient rule for its parameters {sorted(owner.parameters)}; freeze them (stop_gradient=True) "
                    "or register a rule with register_grad_rule"
                )
            if trained and reason is not None:
                raise UnsupportedLayer(f"layer '{owner.path}' ({type(owner.layer).__name__}): {reason}")
        hooks: list[LayerHooks] = [Tap(self, owner, rule) for owner, rule in ruled]
        for root in self.located.roots:
            hooks.append(BatchProbe(self, root, type(root).__name__))
            for path, layer in root.named_sublayers(include_self=True):
                if mixes_samples(layer):
                    hooks.append(MixingGuard(self, layer, path or type(layer).__name__))
        return hooks

    def remove(self) -> None:
        """Takes every hook off the user's layers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # The forward pass

    def forward_begins(self) -> None:
        """A tapped layer runs: what an earlier backward left open is over, and published gradients have been seen."""
        if self.group is not None and not self._final_hook_pending and not backward_depth():
            self.close()
        if self.published:
            self.withdraw_published()

    def trainable(self, parameter: Tensor) -> bool:
        return not parameter.stop_gradient or id(parameter) in self._suppressed

    def suppress(self, parameter: Tensor) -> None:
        """No weight gradient for uses of `parameter` until :meth:`restore`; windows may nest."""
        self._suppressed[id(parameter)] = self._suppressed.get(id(parameter), 0) + 1
        parameter.stop_gradient = True

    def restore(self, parameter: Tensor) -> None:
        left = self._suppressed.pop(id(parameter), 1) - 1
        if left:
            self._suppressed[id(parameter)] = left
        else:
            parameter.stop_gradient = False

    def replace(self, layer: nn.Layer, name: str, substitute: Tensor) -> None:
        """`layer` reads `substitute` for its parameter `name` until :meth:`put_back`."""
        self._replaced.append((layer, name, layer._parameters[name]))
        layer._parameters[name] = substitute

    def put_back(self, layer: nn.Layer, name: str) -> None:
        for k in reversed(range(len(self._replaced))):
            held, held_name, parameter = self._replaced[k]
            if held is layer and held_name == name:
                layer._parameters[name] = parameter
                del self._replaced[k]
                return

    def expand_to_batch(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Inputs of one row that the layer would broadcast (position ids [1, T]) become one row a sample."""
        rows = self.running_rows[-1] if self.running_rows else None
        if rows is None or rows == 1:
            return args, kwargs

        def expand(x: Any) -> Any:
            return x.expand([rows, *x.shape[1:]]) if isinstance(x, Tensor) and x.ndim > 1 and x.shape[0] == 1 else x

        return tuple(map(expand, args)), {name: expand(x) for name, x in kwargs.items()}

    # The backward pass

    def open_group(self) -> Group | None:
        """The group of the running backward(); ``None`` for paddle.grad, whose gradients reach no optimizer."""
        if not self._final_hook_pending:
            if not backward_depth():
                return None
            paddle.base.core.eager._add_backward_final_hook(self._final_hook())
            self._final_hook_pending = True
        if self.group is None:
            self.group = Group()
        return self.group

    def _final_hook(self) -> Callable[[], None]:
        me = weakref.ref(self)

        def backward_ended() -> None:
            capture = me()
            if capture is None:
                return
            capture._final_hook_pending = False
            if capture.group is not None and backward_depth() > 1:
                capture.group.outer_may_run = True
            else:
                capture.close()

        return backward_ended

    def close(self) -> None:
        """Ends the group of the last backward pass and hands it on."""
        group, self.group = self.group, None
        if group is None:
            return
        with self.keeping_failure("the end of backward()"), paddle.no_grad():
            leaked = [self.located.names[k] for k, p in self.parameters.items() if p._grad_ivar() is not None]
            if leaked:
                raise PrivacyError(
                    f"parameters {leaked} got a gradient outside the captured layers (a functional use of the "
                    "parameter, a direct call of layer.forward(), or another optimizer), which per-sample clipping "
                    "would miss; use them only through layers called as layer(x), or clear the gradient"
                )
            self.on_group(group)

    def finish(self) -> None:
        """Called by step(): ends a group whose end only nested backward passes announced, then raises what failed."""
        for key in list(self._suppressed):
            # An interrupt between a layer's two hooks leaves its parameters suppressed.
            del self._suppressed[key]
            self.parameters[key].stop_gradient = False
        while self._replaced:
            layer, name, parameter = self._replaced.pop()
            layer._parameters[name] = parameter
        if self.group is not None:
            if self.group.outer_may_run:
                self.close()
            else:
                self._failure = self._failure or PrivacyError(
                    "a backward() did not finish, so its samples cannot be used; run the batch again"
                )
        if self._failure is not None:
            failure = self._failure
            self.discard()
            raise failure

    def discard(self) -> None:
        """Forgets the open group, any failure, and published gradients: a fresh start for the next batch."""
        self.group, self._failure = None, None
        self.withdraw_published()

    def withdraw_published(self) -> None:
        for parameter in self.parameters.values():
            parameter.clear_gradient(False)
        self.published = False

    @contextmanager
    def keeping_failure(self, where: str) -> Iterator[None]:
        """Keeps an exception for step() to raise: Paddle's hooks would change its type or lose it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, PrivacyError):
                wrapped = PrivacyError(f"per-sample gradients could not be captured at {where}: {error}")
                wrapped.__cause__ = error
                error = wrapped
            self._failure = self._failure or error


_BACKWARD_FILES = ("tensor_patch_methods.py", "backward_mode.py")


def backward_depth() -> int:
    """How many of Paddle's ``backward`` calls are on this thread's stack.

    0: no backward runs, or a hook fires in ``paddle.grad``. More than 1: a backward within a backward, as reentrant
    recompute does, whose end is not the end of the step. Paddle offers no query for this.
    """
    depth, frame = 0, sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_filename.endswith(_BACKWARD_FILES):
            depth += 1
        frame = frame.f_back  # type: ignore[assignment]
    return depth
