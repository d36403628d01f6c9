"""The tap on one layer: its input in the forward pass, its output gradient in the backward pass, its factors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor, nn

from paddle_privacy.errors import PrivacyError, UnsupportedLayer
from paddle_privacy.gradients.factors import Dense, Factor
from paddle_privacy.gradients.hooks import LayerHooks
from paddle_privacy.gradients.locate import Owner
from paddle_privacy.gradients.rules import GradRule

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture


class Call:
    """One forward of a tapped layer, until its output gradient arrives."""

    __slots__ = ("arrived", "inputs", "versions", "wanted")

    def __init__(self, inputs: tuple, wanted: dict[str, int]):
        self.wanted = wanted
        # Detached: the same memory, but the record keeps no graph alive.
        self.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        self.versions = [x.inplace_version if isinstance(x, Tensor) else 0 for x in self.inputs]
        self.arrived = False

    def modified(self) -> bool:
        return any(isinstance(x, Tensor) and x.inplace_version != v for x, v in zip(self.inputs, self.versions))


def shadow(parameter: Tensor) -> Tensor:
    """The same memory as a leaf of its own: takes the gradient that a kernel insists on computing, and is forgotten."""
    leaf = parameter.detach()
    leaf.stop_gradient = False
    return leaf


class Tap(LayerHooks):
    """Suppresses Paddle's own weight gradients while the layer runs and turns (input, output gradient) into factors."""

    def __init__(self, capture: Capture, owner: Owner, rule: GradRule):
        super().__init__(capture, owner.layer, owner.path)
        self.parameters, self.rule = owner.parameters, rule
        self.open: list[list[tuple[str, Tensor]]] = []

    def before(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        capture.forward_begins()
        trained = [item for item in self.parameters.items() if capture.trainable(item[1])]
        if not trained or not paddle.is_grad_enabled():
            self.open.append([])
            return None
        self.check(layer)
        self.open.append(trained)
        for name, parameter in trained:
            if name in self.rule.shadowed:
                capture.replace(layer, name, shadow(parameter))
            else:
                capture.suppress(parameter)
        return capture.expand_to_batch(args, kwargs)

    def after(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict, output: Any) -> Any:
        trained = self.open.pop() if self.open else []
        for name, parameter in trained:
            if name in self.rule.shadowed:
                capture.put_back(layer, name)
            else:
                capture.restore(parameter)
        if not trained or output is None:
            return None
        if not isinstance(output, Tensor):
            raise UnsupportedLayer(
                f"layer '{self.path}' ({type(layer).__name__}) returns {type(output).__name__}, not one tensor"
            )
        wanted = {name: id(parameter) for name, parameter in trained}
        call = Call(() if self.rule.input_free.issuperset(wanted) else (*args, *kwargs.values()), wanted)
        if output.stop_gradient:
            # Nothing upstream is trained. The copy makes the output a non-leaf, so that in-place activations work.
            output.stop_gradient = False
            output = paddle.assign(output)
        output.register_hook(lambda gradient: self.arrive(layer, call, gradient))
        return output

    def check(self, layer: nn.Layer) -> None:
        """Raises UnsupportedLayer where the rule does not hold for this layer as it is now."""
        reason = self.rule.refuses(layer)
        if reason is not None:
            raise UnsupportedLayer(f"layer '{self.path}' ({type(layer).__name__}): {reason}")

    def arrive(self, layer: nn.Layer, call: Call, output_grad: Tensor) -> None:
        """The output gradient is complete. Never raises: Paddle would lose the exception's type."""
        capture = self._capture()
        if capture is None:
            return
        with capture.keeping_failure(f"layer '{self.path}'"), paddle.no_grad():
            group = capture.open_group()
            if group is None:
                return
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
            made = self.rule.factors(layer, call.inputs, output_grad)
            for name, key in call.wanted.items():
                if name not in made:
                    raise UnsupportedLayer(
                        f"layer '{self.path}' ({type(layer).__name__}) trains parameter '{name}', which its gradient "
                        "rule does not know; freeze it or register a rule with register_grad_rule"
                    )
                factor = made[name]
                if not isinstance(factor, (Factor, Tensor)):
                    factor = factor()
                group.add(key, Dense(factor) if isinstance(factor, Tensor) else factor, self.path)
