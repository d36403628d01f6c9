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

import dis
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Callable

import paddle
from paddle import Tensor, nn

from paddle_privacy.errors import PrivacyError, UnsupportedLayer
from paddle_privacy.gradients.bare import BareTap
from paddle_privacy.gradients.entry import EntryHooks, Running
from paddle_privacy.gradients.factors import Factor
from paddle_privacy.gradients.guard import MixingGuard, claim, mixes_samples, repeated_batch
from paddle_privacy.gradients.hooks import LayerHooks
from paddle_privacy.gradients.locate import Located, Owner
from paddle_privacy.gradients.loss_scaling import Scaled, scaling_of
from paddle_privacy.gradients.probe import StructureProbe
from paddle_privacy.gradients.recurrent import RecurrentTap
from paddle_privacy.gradients.rules import find_rule, refusal
from paddle_privacy.gradients.rules.recurrent import FUSED
from paddle_privacy.gradients.tap import Tap
from paddle_privacy.gradients.tied import TiedUses
from paddle_privacy.gradients.uses import Uses


class Group:
    """The samples of one backward pass: for each parameter (by id) the factors of all its uses.

    Attributes:
        frame: Paddle's outermost ``backward`` call, by which nested backward passes (recompute) are told from new ones.
        scaling: what GradScaler multiplied the loss by, if it did.
        rows_known: called once, with the group, as soon as its number of samples is known.
        inputs: what the model was called with in the forwards whose gradients arrived.
        emission: what the sampler said about the batch.
        taken: parameters whose samples were clipped before the backward pass ended, layer by layer.
    """

    def __init__(
        self, frame: FrameType, rows_known: Callable[[Group], None] | None = None, scaling: Scaled | None = None
    ):
        self.batch: int | None = None
        self.first_path = ""
        self.factors: dict[int, list[Factor]] = {}
        self.frame, self.rows_known, self.scaling = frame, rows_known, scaling
        self.thread = threading.get_ident()
        self.inputs: dict[int, Tensor] = {}
        self.emission: Any = None
        self.taken: set[int] = set()
        # What became of them: squared norms [B] of each.
        self.taken_squares: list[Tensor] = []

    def announce(self) -> None:
        if self.rows_known is not None:
            rows_known, self.rows_known = self.rows_known, None
            rows_known(self)

    def reads(self, batch_inputs: list[Tensor]) -> None:
        self.inputs.update((id(x), x) for x in batch_inputs)

    def add(self, key: int, factor: Factor, path: str) -> None:
        if self.batch is None:
            self.batch, self.first_path = factor.batch, path
            self.announce()
        elif factor.batch != self.batch:
            raise PrivacyError(
                f"layer '{path}' saw {factor.batch} rows on its first axis where layer '{self.first_path}' saw "
                f"{self.batch} in the same backward(); the first axis of every activation must be the batch"
            )
        if key in self.taken:
            raise PrivacyError(
                f"a parameter of layer '{path}' got another gradient after the layer's samples had been clipped, so "
                "they would count twice; use clipping='flat' with a layer that is used in such a way"
            )
        self.factors.setdefault(key, []).append(factor)


class Capture:
    """All the taps of one optimizer, and the group of samples whose backward is running.

    Args:
        located: the layers that own the managed parameters.
        on_group: called with each finished :class:`Group`: at the next forward, the next backward or step().
        on_rows: called with each group while its backward runs, once its number of samples is known.
        on_layer: called with the group and the parameters (by id) of a layer as soon as all their uses have arrived,
            which frees what they are made of early; only where that can be known.
        for_training: whether an optimizer will step with it, so that an older one over the same parameters cannot.

    Raises:
        UnsupportedLayer: a layer with a trainable managed parameter has no gradient rule.
    """

    def __init__(
        self,
        located: Located,
        on_group: Callable[[Group], None],
        on_rows: Callable[[Group], None] | None = None,
        on_layer: Callable[[Group, list[int]], None] | None = None,
        *,
        for_training: bool = True,
    ):
        self.located, self.on_group, self.on_rows, self.for_training = located, on_group, on_rows, for_training
        self.parameters = {id(p): p for owner in located.owners for p in owner.parameters.values()}
        self.on_layer = on_layer
        self.uses = Uses()
        self.group: Group | None = None
        self.running = Running()
        self.probe = StructureProbe(self)
        # Batch inputs of the groups since the last step.
        self.used_inputs: dict[int, Tensor] = {}
        self.superseded = ""
        # Whether the `.grad`s that are filled were put there by step(), for the user to look at.
        self.published = False
        self._failure: PrivacyError | None = None
        self._thread: int | None = None
        self._lock = threading.Lock()
        self._suppressed: dict[int, int] = {}
        self._replaced: list[tuple[nn.Layer, str, Tensor]] = []
        self.tied = TiedUses(self)
        self._hooks = self._install()

    def _install(self) -> list[LayerHooks]:
        for owner in self.located.owners:
            trained = any(not p.stop_gradient for p in owner.parameters.values())
            trained = trained or isinstance(owner.layer, nn.SpectralNorm)
            reason = refusal(owner.layer)
            if trained and reason is not None:
                raise UnsupportedLayer(f"layer '{owner.path}' ({type(owner.layer).__name__}): {reason}")
        if self.for_training:
            claim(self)
        hooks: list[LayerHooks] = [self._tap(owner) for owner in self.located.owners]
        owners = {id(owner.layer) for owner in self.located.owners}
        for root in self.located.roots:
            for path, layer in root.named_sublayers(include_self=True):
                path = path or type(root).__name__
                if mixes_samples(layer):
                    hooks.append(MixingGuard(self, layer, path))
                if any(id(sub) in owners for sub in layer.sublayers(include_self=True)):
                    hooks.append(EntryHooks(self, layer, path))
        # An optimizer that is dropped leaves no hooks behind.
        weakref.finalize(self, _remove, hooks)
        return hooks

    def _tap(self, owner: Owner) -> LayerHooks:
        if type(owner.layer) in FUSED:
            return RecurrentTap(self, owner)
        rule = find_rule(owner.layer)
        return BareTap(self, owner) if rule is None else Tap(self, owner, rule)

    def tap_of(self, key: int) -> Tap:
        """The tap of the first owner of the parameter with this id."""
        return next(h for h in self._hooks if isinstance(h, Tap) and key in map(id, h.parameters.values()))

    def remove(self) -> None:
        """Takes every hook off the user's layers."""
        _remove(self._hooks)

    # The forward pass

    def forward_begins(self) -> None:
        """A tapped layer runs: what an earlier backward left open is over, and published gradients have been seen."""
        if threading.get_ident() != self._thread:
            return
        if self.group is not None and running_backward() is not self.group.frame:
            self.close()
        if self.published:
            self.withdraw_published()

    def trainable(self, parameter: Tensor) -> bool:
        return not parameter.stop_gradient or id(parameter) in self._suppressed

    def suppress(self, parameter: Tensor) -> None:
        """No weight gradient for uses of `parameter` until :meth:`restore`; windows may nest."""
        with self._lock:
            self._suppressed[id(parameter)] = self._suppressed.get(id(parameter), 0) + 1
            parameter.stop_gradient = True

    def restore(self, parameter: Tensor) -> None:
        with self._lock:
            left = self._suppressed.pop(id(parameter), 1) - 1
            if left:
                self._suppressed[id(parameter)] = left
            else:
                parameter.stop_gradient = False

    def replace(self, layer: nn.Layer, name: str, substitute: Tensor) -> None:
        """`layer` reads `substitute` for its parameter `name` until :meth:`put_back`."""
        with self._lock:
            self._replaced.append((layer, name, layer._parameters[name]))
            layer._parameters[name] = substitute

    def put_back(self, layer: nn.Layer, name: str) -> None:
        with self._lock:
            for k in reversed(range(len(self._replaced))):
                held, held_name, parameter = self._replaced[k]
                if held is layer and held_name == name:
                    layer._parameters[name] = parameter
                    del self._replaced[k]
                    return

    def holds(self, layer: nn.Layer, name: str, parameter: Tensor) -> bool:
        """Whether the layer still owns the parameter that it was located with (or its stand-in of this moment)."""
        return layer._parameters.get(name) is parameter or any(
            held is layer and held_name == name for held, held_name, _ in self._replaced
        )

    def restore_interrupted(self) -> None:
        """Ends what an interrupt (KeyboardInterrupt runs no post-hooks) left between a layer's two hooks."""
        with self._lock:
            for key in list(self._suppressed):
                del self._suppressed[key]
                self.parameters[key].stop_gradient = False
            while self._replaced:
                layer, name, parameter = self._replaced.pop()
                layer._parameters[name] = parameter

    def batch_inputs(self) -> list[Tensor]:
        """The tensors that the running model was called with, if one runs (recompute runs layers without)."""
        return self.running.entry.inputs if self.running.entry is not None else []

    def in_backward(self) -> bool:
        return running_backward() is not None

    def in_higher_order_gradient(self) -> bool:
        """Whether paddle.grad(create_graph=True) is on this thread's stack."""
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "grad" and frame.f_code.co_filename.endswith("base.py"):
                return bool(frame.f_locals.get("create_graph"))
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def rows(self) -> int | None:
        """How many samples the running forward has, if that is known."""
        entry = self.running.entry
        if entry is not None:
            return entry.rows
        # Recompute runs a layer in the backward pass, after its model's forward.
        known = self.group.batch if self.group is not None else None
        return self.running.last_rows if known is None else known

    def has_batch(self, x: Tensor) -> bool:
        """Whether the first axis of an input can be the batch, or one row that stands for it."""
        entry, rows = self.running.entry, self.rows()
        if not x.ndim or rows is None:
            return True
        if (x.shape[0] == 1 and x.ndim > 1) or x.shape[0] == rows:
            return True
        return entry is not None and self.running.probing is None and x.shape[0] in entry.sizes

    def expand_to_batch(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Inputs of one row that the layer would broadcast (position ids [1, T]) become one row a sample."""
        rows = self.rows()
        if rows is None or rows == 1:
            return args, kwargs

        def expand(x: Any) -> Any:
            return x.expand([rows, *x.shape[1:]]) if isinstance(x, Tensor) and x.ndim > 1 and x.shape[0] == 1 else x

        return tuple(map(expand, args)), {name: expand(x) for name, x in kwargs.items()}

    # The backward pass

    def open_group(self) -> Group | None:
        """The group of the running backward(); ``None`` for paddle.grad, whose gradients reach no optimizer."""
        frame = running_backward()
        if frame is None:
            return None
        if self.group is not None and self.group.thread == threading.get_ident() and self.group.frame is not frame:
            self.close()
        if self.group is None:
            self.group = Group(frame, self.on_rows, scaling_of(frame))
            self._thread = self.group.thread
        elif self.group.thread != threading.get_ident():
            raise PrivacyError(
                "two threads ran backward() through one model at the same time; give each its own model and optimizer"
            )
        return self.group

    def close(self) -> None:
        """The backward pass of the open group is over: hands the group on."""
        group, self.group = self.group, None
        if group is None:
            return
        self.uses.forget()
        with self.keeping_failure("the end of backward()"), paddle.no_grad():
            if not returned(group.frame):
                raise PrivacyError("a backward() did not finish, so its samples cannot be used; run the batch again")
            group.announce()
            leaked = [self.located.names[k] for k, p in self.parameters.items() if p._grad_ivar() is not None]
            if leaked:
                raise PrivacyError(
                    f"parameters {leaked} got a gradient outside the captured layers (a functional use of the "
                    "parameter, a direct call of layer.forward(), or another optimizer), which per-sample clipping "
                    "would miss; use them only through layers called as layer(x), or clear the gradient"
                )
            again = repeated_batch(group, self.used_inputs)
            if again is not None:
                raise again
            self.used_inputs.update(group.inputs)
            self.on_group(group)

    def finish(self) -> None:
        """Called by step(): closes the open group, then raises what failed."""
        if self.superseded:
            raise PrivacyError(self.superseded)
        self.running.clear()
        self.restore_interrupted()
        self.close()
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


def _remove(hooks: list[LayerHooks]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


_BACKWARD_FILES = ("tensor_patch_methods.py", "backward_mode.py")


def running_backward() -> FrameType | None:
    """The outermost of Paddle's ``backward`` calls on this thread's stack; hooks in ``paddle.grad`` see none.

    Paddle offers no query for this, and its final hooks are one list for all threads, run (and, when two threads end at
    once, corrupted) by whichever backward ends first.
    """
    found, frame = None, sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "backward" and code.co_filename.endswith(_BACKWARD_FILES):
            found = frame
        frame = frame.f_back  # type: ignore[assignment]
    return found


def returned(frame: FrameType) -> bool:
    """Whether a call that is over ended by returning, not by an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")
