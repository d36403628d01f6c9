"""The tap on one layer: its input in the forward pass, its output gradient in the backward pass, its factors."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import paddle
from paddle import Tensor, nn

from paddle_privacy.errors import PrivacyError, UnsupportedLayer
from paddle_privacy.gradients.factors import Dense, Factor
from paddle_privacy.gradients.hooks import LayerHooks, map_tensors, paused, tensors
from paddle_privacy.gradients.locate import Owner
from paddle_privacy.gradients.probe import Seen, batch_axis
from paddle_privacy.gradients.rules import GradRule
from paddle_privacy.gradients.rules.registry import Lazy
from paddle_privacy.gradients.stand_in import ProductHook, StandIn, product_factor, stand_in

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture


class Call:
    """One forward of a tapped layer, until its output gradient arrives."""

    __slots__ = ("arrived", "batch_inputs", "inputs", "layer", "versions", "wanted")

    def __init__(self, inputs: tuple, wanted: dict[str, int], batch_inputs: list[Tensor]):
        self.wanted = wanted
        # What the model was called with in this forward.
        self.batch_inputs = batch_inputs
        # Set where this is a plain call of the layer, whose only output is watched.
        self.layer: int | None = None
        # Detached: the same memory, but the record keeps no graph alive.
        self.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        self.versions = [x.inplace_version if isinstance(x, Tensor) else 0 for x in self.inputs]
        self.arrived = False

    def copy(self) -> Call:
        return Call(self.inputs, self.wanted, self.batch_inputs)

    def modified(self) -> bool:
        return any(isinstance(x, Tensor) and x.inplace_version != v for x, v in zip(self.inputs, self.versions))


class Opened(NamedTuple):
    """A running call: the parameters that are suppressed for it, and whether its axes have to be those of the batch."""

    trained: list[tuple[str, Tensor]]
    wanted: bool


class Open(threading.local):
    """The calls of one layer that run in this thread, each with the parameters that were suppressed for it."""

    def __init__(self) -> None:
        self.calls: list[Opened] = []
        # What a subclass of Tap remembers of the innermost of them.
        self.entered: list[Any] = []


def own_node(output: Tensor) -> Tensor:
    """The output as a node of its own in the graph.

    Needed where nothing upstream is trained (a leaf would not bear in-place activations), and where a layer returns
    several tensors, one of which may be computed from another: a hook must see only what comes from outside.
    """
    if output.stop_gradient:
        output.stop_gradient = False
    return paddle.assign(output)


def positional(layer: nn.Layer, args: tuple, kwargs: dict) -> tuple:
    """The inputs in the order of the forward's signature, however they were passed."""
    if not kwargs:
        return args
    bound = inspect.signature(layer.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return (*bound.args, *bound.kwargs.values())


def shadow(parameter: Tensor) -> Tensor:
    """The same memory as a leaf of its own: takes the gradient that a kernel insists on computing, and is forgotten."""
    leaf = parameter.detach()
    leaf.stop_gradient = False
    return leaf


class Tap(LayerHooks):
    """Suppresses Paddle's own weight gradients while the layer runs and turns (input, output gradient) into factors."""

    def __init__(self, capture: Capture, owner: Owner, rule: GradRule | None):
        super().__init__(capture, owner.layer, owner.path)
        self.parameters, self._rule = owner.parameters, rule
        self.kind = type(owner.layer).__name__
        self.described = f"layer '{self.path}' ({self.kind})"
        # Ranks of inputs that were seen without a batch axis.
        self.shared_ranks: set[int] = set()
        self.open = Open()

    @property
    def rule(self) -> GradRule:
        assert self._rule is not None
        return self._rule

    def before(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        trained = [item for item in self.parameters.items() if capture.trainable(item[1])]
        if trained and not self.captures(capture, layer, args, kwargs):
            # What is the same for all samples is captured where the model gives it a batch; see gradients/tied.py.
            trained = []
        if capture.running.probing is not None:
            self.open.calls.append(Opened([], bool(trained)))
            return self.batched(capture, args, kwargs) if trained else None
        capture.forward_begins()
        if not trained or not paddle.is_grad_enabled():
            self.open.calls.append(Opened([], bool(trained)))
            return None
        self.check(capture, layer)
        self.open.calls.append(Opened(trained, True))
        return self.enter(capture, layer, trained, args, kwargs)

    def captures(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> bool:
        """Whether this call has a batch, so that the layer's parameters are captured here."""
        if not self.rule.lookup:
            return True
        shared = any(self.is_shared(capture, ids) for ids in tensors((args, kwargs)))
        if shared and not capture.tied.expands(layer):
            if capture.running.entry is not None:
                capture.running.entry.passed.add(id(layer))
            return False
        return True

    def is_shared(self, capture: Capture, ids: Tensor) -> bool:
        """Whether all samples look up the same `ids`, which then have no batch axis.

        Told by their length, once for each rank: later they may have the batch's length by chance.
        """
        rows = capture.rows()
        if rows is None or not ids.ndim:
            return False
        by_chance = ids.ndim == 1 and ids.shape[0] == rows
        counting = by_chance and rows > 1 and bool((ids[1:] - ids[:-1] == 1).all())
        if ids.ndim in self.shared_ranks:
            if by_chance and not counting:
                raise UnsupportedLayer(
                    f"{self.described} was called with {rows} ids for {rows} samples, where earlier all samples shared "
                    "the ids; use one layer for positions and another for what differs between samples, or give "
                    "position ids as [B, T]"
                )
            return not (ids.ndim > 1 and ids.shape[0] == 1)
        shared = counting or not capture.has_batch(ids)
        if shared and capture.running.probing is None:
            self.shared_ranks.add(ids.ndim)
        return shared

    def batched(self, capture: Capture, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The inputs with what is broadcast expanded to the batch."""
        if not self.rule.lookup:
            return capture.expand_to_batch(args, kwargs)

        def expand(ids: Tensor) -> Tensor:
            return ids.unsqueeze(0).expand([capture.rows(), *ids.shape]) if self.is_shared(capture, ids) else ids

        return capture.expand_to_batch(*map_tensors(expand, (args, kwargs)))

    def enter(
        self, capture: Capture, layer: nn.Layer, trained: list[tuple[str, Tensor]], args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """A forward with trained parameters begins; may return replaced inputs."""
        for name, parameter in trained:
            if name in self.rule.shadowed:
                leaf = shadow(parameter)
                capture.running.shadows.append(leaf)
                capture.replace(layer, name, leaf)
            else:
                capture.suppress(parameter)
                if layer._parameters[name] is not parameter:
                    # A stand-in for uses of the parameter outside its layer; this is the layer.
                    capture.replace(layer, name, parameter)
        return self.batched(capture, args, kwargs)

    def leave(self, capture: Capture, layer: nn.Layer, trained: list[tuple[str, Tensor]]) -> Any:
        """The forward is over, by returning or by raising: puts back what :meth:`enter` changed.

        What it returns is given to :meth:`watch`.
        """
        for name, parameter in trained:
            if name not in self.rule.shadowed:
                capture.restore(parameter)
            capture.put_back(layer, name)

    def after(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict, output: Any) -> Any:
        opened = self.open.calls.pop() if self.open.calls else Opened([], False)
        trained = opened.trained
        left = self.leave(capture, layer, trained) if trained else None
        if output is not None:
            self.see(capture, layer, (args, kwargs), output, opened)
        if not trained or output is None:
            return None
        return self.watch(capture, layer, trained, (args, kwargs), output, left)

    def watch(
        self,
        capture: Capture,
        layer: nn.Layer,
        trained: list[tuple[str, Tensor]],
        inputs: tuple,
        output: Any,
        left: Any,
    ) -> Any:
        """Asks for the gradients of the outputs; may return a replaced output."""
        distinct = {id(x): x for x in tensors(output)}
        if not self.rule.many_outputs and (len(distinct) != 1 or not isinstance(output, Tensor)):
            raise UnsupportedLayer(
                f"layer '{self.path}' ({type(layer).__name__}) returns {type(output).__name__}, not one tensor"
            )
        wanted = {name: id(parameter) for name, parameter in trained}
        call = Call(
            () if self.rule.input_free.issuperset(wanted) else positional(layer, *inputs),
            wanted,
            capture.batch_inputs(),
        )
        replaced = {}
        for position, (key, out) in enumerate(distinct.items()):
            if out.stop_gradient or len(distinct) > 1:
                out = own_node(out)
            replaced[key] = out
            if len(distinct) == 1:
                call.layer = id(layer)
                capture.uses.watched(capture, layer, wanted.values())
            self._ask(layer, call, out, position, len(distinct))
        return map_tensors(lambda x: replaced[id(x)], output)

    def _ask(self, layer: nn.Layer, call: Call, out: Tensor, position: int, count: int) -> None:
        if not self.rule.many_outputs:
            out.register_hook(
                lambda gradient: self.arrive(call, lambda: self.rule.factors(layer, call.inputs, gradient))
            )
            return
        # Linear in the output gradients, which therefore may come one by one.
        one = call if count == 1 else call.copy()

        def arrive(gradient: Tensor) -> None:
            gradients = tuple(gradient if k == position else None for k in range(count))
            self.arrive(one, lambda: self.rule.factors(layer, one.inputs, gradients))

        out.register_hook(arrive)

    # Stand-ins for a parameter that is used barely; see gradients/stand_in.py.

    def product_stand_in(self, capture: Capture, parameter: Tensor) -> StandIn:
        """A stand-in for a parameter that was seen in products only."""
        me, name = weakref.ref(self), capture.located.names[id(parameter)]

        def on_stray(gradient: Tensor) -> None:
            tap = me()
            capture = None if tap is None else tap._capture()
            if tap is None or capture is None or paused() or capture.open_group() is None:
                return
            with capture.keeping_failure(tap.described):
                raise PrivacyError(
                    f"parameter '{name}' was used in another way than at the first batch, where it occurred in matrix "
                    "products only; build the optimizer anew when the model starts to compute something else"
                )

        return stand_in(parameter, self.on_product(capture, parameter), on_stray=on_stray)

    def on_product(self, capture: Capture, parameter: Tensor) -> ProductHook:
        """What a product stand-in for `parameter` calls: asks for the gradient of the product."""
        me, wanted = weakref.ref(self), {"product": id(parameter)}

        def on_product(x: Tensor, y: Tensor, transposed: bool) -> None:
            call = Call((x,), wanted, capture.batch_inputs())

            def arrive(gradient: Tensor) -> None:
                tap = me()
                if tap is not None:
                    tap.arrive(call, lambda: {"product": product_factor(call.inputs[0], gradient, transposed)})

            y.register_hook(arrive)

        return on_product

    def keep_own_gradient(self, capture: Capture, leaf: StandIn, parameter: Tensor, rows: int) -> None:
        """Takes the gradient of an expanded stand-in for the per-sample gradient of `parameter`."""
        call = Call((), {"copies": id(parameter)}, capture.batch_inputs())
        shape = [rows, *parameter.shape]
        leaf.register_hook(lambda gradient: self.arrive(call, lambda: {"copies": gradient.reshape(shape)}))

    def see(self, capture: Capture, layer: nn.Layer, inputs: tuple, output: Any, opened: Opened) -> None:
        """Tells the entry and the structure probe about this call.

        Raises:
            UnsupportedLayer: the first axis of the output cannot be the batch.
        """
        running = capture.running
        entry = running.entry
        if entry is None:
            return
        axis = batch_axis(layer)
        first = next((x for x in tensors(output) if x.ndim > axis), None)
        rows = None if first is None else first.shape[axis]
        recording = running.probing or entry.recording
        if opened.trained and rows is not None and running.probing is None:
            entry.check_rows(self.path, type(layer).__name__, rows)
        if running.probing is None:
            entry.called.add(id(layer))
            if opened.wanted and not paddle.is_grad_enabled() and entry.recording is not None:
                capture.uses.postponed(layer)
        if recording is not None and recording.wanted:
            with paddle.no_grad():
                recording.add(Seen(self.path, type(layer).__name__, opened.wanted, axis, inputs, output, rows))

    def check(self, capture: Capture, layer: nn.Layer) -> None:
        """Raises UnsupportedLayer where the rule does not hold for this layer as it is now."""
        kind = type(layer).__name__
        if "forward" in layer.__dict__:
            raise UnsupportedLayer(
                f"layer '{self.path}' ({kind}) has a forward of its own (the instance was patched), which the gradient "
                "rule of its class does not describe; put the change in a subclass"
            )
        if not isinstance(getattr(next(reversed(layer._forward_pre_hooks.values())), "__self__", None), LayerHooks):
            raise UnsupportedLayer(
                f"layer '{self.path}' ({kind}) got a forward_pre_hook after the optimizer was built, which would run "
                "where the layer's parameters are captured; register hooks before building the optimizer"
            )
        for name, parameter in self.parameters.items():
            if not capture.holds(layer, name, parameter):
                raise PrivacyError(
                    f"layer '{self.path}' ({kind}) holds another '{name}' than when the optimizer was built, so the "
                    "optimizer would train a parameter that is not in the model; build the optimizer after the model "
                    "is converted, wrapped or fixed"
                )
        reason = None if self._rule is None else self._rule.refuses(layer)
        if reason is not None:
            raise UnsupportedLayer(f"layer '{self.path}' ({type(layer).__name__}): {reason}")

    def arrive(self, call: Call, factors: Callable[[], Mapping[str, Lazy]]) -> None:
        """An output gradient is complete. Never raises: Paddle would lose the exception's type."""
        capture = self._capture()
        if capture is None or paused():
            return
        with capture.keeping_failure(f"layer '{self.path}'"), paddle.no_grad():
            group = capture.open_group()
            if group is None:
                if capture.in_higher_order_gradient():
                    raise PrivacyError(
                        f"paddle.grad(create_graph=True) went through layer '{self.path}': the gradient of a gradient "
                        "does not pass the captured output gradients, so part of each sample's gradient would be lost; "
                        "leave the gradient penalty out"
                    )
                return
            group.reads(call.batch_inputs)
            if call.arrived:
                raise PrivacyError(
                    f"layer '{self.path}' got two gradients from one forward (two backward() calls, or paddle.grad "
                    "inside the loss), so each sample would count twice; add the losses and call backward() once"
                )
            call.arrived = True
            if call.modified():
                raise PrivacyError(
                    f"the input of layer '{self.path}' was modified in place after the layer read it; use the "
                    "out-of-place operation"
                )
            made = factors()
            for name, key in call.wanted.items():
                if name not in made:
                    raise UnsupportedLayer(
                        f"layer '{self.path}' ({self.kind}) trains parameter '{name}', which its gradient "
                        "rule does not know; freeze it or register a rule with register_grad_rule"
                    )
                factor = made[name]
                if not isinstance(factor, (Factor, Tensor)):
                    factor = factor()
                group.add(key, Dense(factor) if isinstance(factor, Tensor) else factor, self.path)
            # The hook lives as long as the graph; an input that no factor has kept can go now.
            call.inputs = ()
            if call.layer is not None:
                keys = list(call.wanted.values())
                if capture.uses.arrived(call.layer, keys) and capture.on_layer is not None:
                    capture.on_layer(group, keys)
