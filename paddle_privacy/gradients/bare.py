"""Taps on layers that use their own parameters barely: ``cls_token``, ``pos_embed``, layer scale, ``x @ self.w``.

The children of such a layer have taps of their own; here it is about what the layer does itself. The parameter never
meets the graph: while the forward runs the layer reads a stand-in, whose kind was found by trial at the first batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor, nn

from paddle_privacy.gradients.hooks import map_tensors, tensors
from paddle_privacy.gradients.replay import ForwardAgain, RowByRow, is_random, replay
from paddle_privacy.gradients.rules.peft import SPELT_OUT
from paddle_privacy.gradients.rules.registry import Lazy, class_name
from paddle_privacy.gradients.stand_in import StandIn, expanded, stand_in
from paddle_privacy.gradients.tap import Call, Tap, own_node
from paddle_privacy.gradients.trial import Strategy, find_strategies

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture
    from paddle_privacy.gradients.locate import Owner


class Bare:
    """One forward of the layer: which stand-ins stand where."""

    def __init__(
        self,
        trained: list[tuple[str, Tensor]],
        strategies: list[Strategy],
        forward: ForwardAgain,
        held: dict[str, Any],
    ):
        self.trained, self.strategies, self.forward = trained, strategies, forward
        # Attributes of the layer that are set otherwise while it runs.
        self.held = held
        self.stand_ins: dict[str, StandIn] = {}
        self.replayed = [item for item, s in zip(trained, strategies) if s.kind in ("replay", "rows")]
        self.by_rows = any(s.kind == "rows" for s in strategies)


class BareTap(Tap):
    """The tap on a layer without a gradient rule that owns parameters."""

    def __init__(self, capture: Capture, owner: Owner):
        super().__init__(capture, owner, None)
        self.strategies: dict[tuple, list[Strategy]] = {}
        self.row_by_row = RowByRow()
        self.batched_ranks: dict[tuple[int, ...], bool] = {}

    def captures(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> bool:
        rows = capture.rows()
        inputs = [x for x in tensors((args, kwargs)) if x.ndim]
        ranks = tuple(x.ndim for x in inputs)
        # Told by their lengths, once for each kind of call: later they may have the batch's length by chance.
        if ranks not in self.batched_ranks and rows is not None and rows > 1:
            self.batched_ranks[ranks] = any(x.shape[0] == rows for x in inputs)
        return self.batched_ranks.get(ranks, True)

    def batched(self, capture: Capture, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs

    def enter(
        self, capture: Capture, layer: nn.Layer, trained: list[tuple[str, Tensor]], args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        rows = capture.rows()
        if rows is None:
            rows = next((x.shape[0] for x in tensors((args, kwargs)) if x.ndim), 1)
        spelt_out = SPELT_OUT.get(class_name(type(layer)), {})
        held = {name: layer.__dict__[name] for name in spelt_out}
        layer.__dict__.update(spelt_out)
        slots = [(layer, name) for name, _ in trained]
        forward = ForwardAgain(layer, slots, args, kwargs, rows)
        try:
            strategies = self.strategies_for(layer, trained, forward)
        except BaseException:
            layer.__dict__.update(held)
            raise
        bare = Bare(trained, strategies, forward, held)
        for (name, parameter), strategy in zip(trained, bare.strategies):
            if strategy.kind == "unused":
                continue
            if strategy.kind == "product":
                made = self.product_stand_in(capture, parameter)
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
        layer.__dict__.update(bare.held)
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
        if bare.by_rows:
            leaves = {id(p): bare.stand_ins[name] for name, p in bare.replayed}
            others = [*layer.parameters(), *capture.running.shadows]
            return self.row_by_row.ask(
                self, output, leaves, others, bare.forward.rows, capture.batch_inputs(), self.described
            )
        replaced = {id(x): x for x in tensors(output)}
        outputs = [x.detach() for x in tensors(output)]
        positions = {id(x): which for which, x in reversed(list(enumerate(tensors(output))))}
        for key, out in list(replaced.items()):
            if not out.stop_gradient:
                replaced[key] = own_node(out)
                self._replay_on_arrival(capture, bare, replaced[key], outputs, positions[key])
        return map_tensors(lambda x: replaced[id(x)], output)

    def strategies_for(
        self, layer: nn.Layer, trained: list[tuple[str, Tensor]], forward: ForwardAgain
    ) -> list[Strategy]:
        """By trial at the first batch of this kind: same parameters, mode and ranks of the inputs."""
        ranks = tuple(x.ndim for x in tensors((forward.args, forward.kwargs)))
        alone = forward.rows == 1
        key = (layer.training, alone, tuple(name for name, _ in trained), ranks)
        if key not in self.strategies:
            parameters = [p for _, p in trained]
            found = find_strategies(forward, parameters, forward.rows, layer.parameters())
            rest = "replay"
            if any(s is None for s in found):
                with paddle.no_grad():
                    outputs = forward([stand_in(p) for p in parameters])
                # The gradient of a batch of one is its sample's.
                rest = "rows" if alone or is_random(forward, parameters, outputs) else "replay"
            self.strategies[key] = [s or Strategy(rest) for s in found]
        return self.strategies[key]

    def _replay_on_arrival(self, capture: Capture, bare: Bare, out: Tensor, outputs: list[Tensor], which: int) -> None:
        forward, parameters = bare.forward, [p for _, p in bare.trained]
        places = [k for k, s in enumerate(bare.strategies) if s.kind == "replay"]
        wanted = {name: id(p) for name, p in bare.replayed}
        call = Call(tuple(tensors((forward.args, forward.kwargs))), wanted, capture.batch_inputs())

        def factors(gradient: Tensor) -> dict[str, Lazy]:
            made = replay(forward, parameters, places, outputs, which, gradient, self.described)
            return dict(zip(wanted, made))

        out.register_hook(lambda gradient: self.arrive(call, lambda: factors(gradient)))
