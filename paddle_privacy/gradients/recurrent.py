"""The tap on `nn.SimpleRNN`, `nn.LSTM` and `nn.GRU`: takes the place of Paddle's fused kernel while the layer runs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paddle import Tensor, nn

from paddle_privacy.gradients.rules.recurrent import run_fused
from paddle_privacy.gradients.rules.registry import Lazy
from paddle_privacy.gradients.tap import Call, Tap

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture
    from paddle_privacy.gradients.locate import Owner


class RecurrentTap(Tap):
    """Where Paddle would run its cells one by one (LSTM projection), their own taps do the work instead."""

    def __init__(self, capture: Capture, owner: Owner):
        super().__init__(capture, owner, None)

    def captures(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> bool:
        return True

    def batched(self, capture: Capture, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs

    def enter(
        self, capture: Capture, layer: nn.Layer, trained: list[tuple[str, Tensor]], args: tuple, kwargs: dict
    ) -> None:
        if not layer.could_use_cudnn:
            return
        me = weakref.ref(self)
        wanted = {id(parameter) for _, parameter in trained}
        batch_inputs = capture.batch_inputs()

        def fused(inputs: Tensor, initial_states: Any, sequence_length: Tensor | None) -> tuple:
            read = Call((inputs,), {}, batch_inputs)

            def keep(cell: nn.Layer, made: Mapping[str, Lazy]) -> None:
                tap = me()
                if tap is None:
                    return
                names = {name: id(p) for name, p in cell._parameters.items() if p is not None and id(p) in wanted}
                call = read.copy()
                call.wanted, call.versions = names, read.versions
                tap.arrive(call, lambda: made)

            return run_fused(layer, inputs, initial_states, sequence_length, keep)

        layer.__dict__["_cudnn_impl"] = fused

    def leave(self, capture: Capture, layer: nn.Layer, trained: list[tuple[str, Tensor]]) -> None:
        layer.__dict__.pop("_cudnn_impl", None)

    def watch(
        self,
        capture: Capture,
        layer: nn.Layer,
        trained: list[tuple[str, Tensor]],
        inputs: tuple,
        output: Any,
        left: Any,
    ) -> None:
        return None
