"""Taps on layers that use their own parameters barely: ``cls_token``, ``pos_embed``, layer scale, ``x @ self.w``.

The children of such a layer have taps of their own; here it is about what the layer does itself. The parameter never
meets the graph: while the forward runs the layer reads a stand-in, whose kind was found by trial at the first batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor, nn

from paddle_privacy.errors import UnsupportedLayer
from paddle_privacy.gradients.factors import Dense, Factor
from paddle_privacy.gradients.hooks import hooks_paused, map_tensors, tensors
from paddle_privacy.gradients.replay import ForwardAgain, is_random, replay, row_gradients
from paddle_privacy.gradients.stand_in import StandIn, expanded, stand_in
from paddle_privacy.gradients.tap import Call, Tap, own_node
from paddle_privacy.gradients.trial import Strategy, find_strategies

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture
    from paddle_privacy.gradients.locate import Owner

_KEPT_GRAPHS = 16


class Bare:
    """One forward of the layer: which stand-ins stand where."""

    def __init__(self, trained: list[tuple[str, Tensor]], strategies: list[Strategy], forward: ForwardAgain):
        self.trained, self.strategies, self.forward = trained, strategies, forward
        self.stand_ins: dict[str, StandIn] = {}
        self.replayed = [item for item, s in zip(trained, strategies) if s.kind in ("replay", "rows")]
        self.by_rows = any(s.kind == "rows" for s in strategies)


class BareTap(Tap):
    """The tap on a layer without a gradient rule that owns parameters."""

    def __init__(self, capture: Capture, owner: Owner):
        super().__init__(capture, owner, None)
        self.strategies: dict[tuple, list[Strategy]] = {}
        # Outputs whose graph is differentiated row by row when their gradient arrives; Paddle's hooks must not own
        # the tensor that they are on.
        self.kept: dict[int, Tensor] = {}

    def enter(
        self, capture: Capture, layer: nn.Layer, trained: list[tuple[str, Tensor]], args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        rows = capture.rows()
        if rows is None:
            rows = next((x.shape[0] for x in tensors((args, kwargs)) if x.ndim), 1)
        slots = [(layer, name) for name, _ in trained]
        forward = ForwardAgain(layer, slots, args, kwargs, rows)
        bare = Bare(trained, self.strategies_for(layer, trained, forward), forward)
        for (name, parameter), strategy in zip(trained, bare.strategies):
            if strategy.kind == "unused":
                continue
            if strategy.kind == "product":
                made = stand_in(parameter, self.on_product(capture, parameter))
            elif strategy.kind == "expanded":
                made = expanded(parameter, rows, strategy.axes)
                self.keep_own_gradient(capture, made, parameter, rows)
            else:
                made = stand_in(parameter)
            bare.stand_ins[name] = made
            capture.replace(layer, name, made)
        self.open.entered.append(bare)
        return None

    def leave(self, capture: Capture, layer: nn.Layer, trained: list[tuple[str, Tensor]]) -> Bare:
        bare: Bare = self.open.entered.pop()
        for name in bare.stand_ins:
            capture.put_back(layer, name)
        return bare

    def watch(
        self,
        capture: Capture,
        layer: nn.Layer,
        trained: list[tuple[str, Tensor]],
        inputs: tuple,
        output: Any,
        left: Any,
    ) -> None:
        bare: Bare = left
        if not bare.replayed:
            return None
        distinct = {id(x): x for x in tensors(output)}
        outputs = [x.detach() for x in tensors(output)]
        positions = {id(x): which for which, x in reversed(list(enumerate(tensors(output))))}
        replaced = dict(distinct)
        for key, out in distinct.items():
            if not out.stop_gradient:
                replaced[key] = own_node(out) if len(distinct) > 1 else out
                self._send_back(capture, layer, bare, replaced[key], outputs, positions[key])
        return map_tensors(lambda x: replaced[id(x)], output) if len(distinct) > 1 else None

    def strategies_for(
        self, layer: nn.Layer, trained: list[tuple[str, Tensor]], forward: ForwardAgain
    ) -> list[Strategy]:
        """By trial at the first batch of this kind: same parameters, mode and ranks of the inputs."""
        ranks = tuple(x.ndim for x in tensors((forward.args, forward.kwargs)))
        alone = forward.rows == 1
        key = (layer.training, alone, tuple(name for name, _ in trained), ranks)
        if key not in self.strategies:
            parameters = [p for _, p in trained]
            found = find_strategies(forward, parameters, forward.rows)
            rest = "replay"
            if any(s is None for s in found):
                with paddle.no_grad():
                    outputs = forward([p.detach() for p in parameters])
                # The gradient of a batch of one is its sample's.
                rest = "rows" if alone or is_random(forward, parameters, outputs) else "replay"
            self.strategies[key] = [s or Strategy(rest) for s in found]
        return self.strategies[key]

    # Gradients arrive

    def _send_back(
        self, capture: Capture, layer: nn.Layer, bare: Bare, out: Tensor, outputs: list[Tensor], which: int
    ) -> None:
        names = [name for name, _ in bare.replayed]
        call = Call(
            tuple(tensors((bare.forward.args, bare.forward.kwargs))),
            {name: id(p) for name, p in bare.replayed},
            capture.batch_inputs(),
        )
        if out.shape[0] != bare.forward.rows:
            raise UnsupportedLayer(
                f"layer '{self.path}' ({type(layer).__name__}) has no gradient rule and returns a tensor of "
                f"{out.shape[0]} rows for {bare.forward.rows} samples; return batch first, or register a rule with "
                "register_grad_rule"
            )
        mark = id(call)
        if bare.by_rows:
            self.kept[mark] = out
            while len(self.kept) > _KEPT_GRAPHS:
                del self.kept[next(iter(self.kept))]

        def factors(gradient: Tensor) -> dict[str, Factor]:
            if not bare.by_rows:
                made = replay(
                    bare.forward,
                    [p for _, p in bare.replayed],
                    outputs,
                    which,
                    gradient,
                    f"layer '{self.path}' ({type(layer).__name__})",
                )
            else:
                kept = self.kept.pop(mark, None)
                if kept is None:
                    raise UnsupportedLayer(
                        f"layer '{self.path}' ({type(layer).__name__}) ran more than {_KEPT_GRAPHS} times before its "
                        "backward, and only the last graphs are kept; register a rule with register_grad_rule"
                    )
                with hooks_paused():
                    made = row_gradients(kept, [bare.stand_ins[name] for name in names], gradient)
            return {name: Dense(g) for name, g in zip(names, made)}

        out.register_hook(lambda gradient: self.arrive(call, lambda: factors(gradient)))
