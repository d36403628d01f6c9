"""The tap on `nn.SimpleRNN`, `nn.LSTM` and `nn.GRU`: takes the place of Paddle's fused kernel while the layer runs."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from paddle import Tensor, nn

from paddle_privacy.gradients.rules.recurrent import run_fused
from paddle_privacy.gradients.rules.registry import Lazy
from paddle_privacy.gradients.tap import Call, Opened, Tap, positional

if TYPE_CHECKING:
    from paddle_privacy.gradients.capture import Capture
    from paddle_privacy.gradients.locate import Owner


class RecurrentTap(Tap):
    """Where Paddle would run its cells one by one (LSTM projection), their own taps do the work instead."""

    def __init__(self, capture: Capture, owner: Owner):
        super().__init__(capture, owner, None)

    def before(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if capture.running.probing is not None:
            # The probe compares bit by bit, so that it has to run the kernels that training runs.
            self.take_over(capture, layer, {})
        return super().before(capture, layer, args, kwargs)

    def after(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict, output: Any) -> Any:
        layer.__dict__.pop("_cudnn_impl", None)
        return super().after(capture, layer, args, kwargs, output)

    def see(self, capture: Capture, layer: nn.Layer, inputs: tuple, output: Any, opened: Opened) -> None:
        # Not the states: their batch is on the second axis, and the first may have its length by chance.
        super().see(capture, layer, positional(layer, *inputs)[:1], output[0], opened)

    def captures(self, capture: Capture, layer: nn.Layer, args: tuple, kwargs: dict) -> bool:
        return True

    def batched(self, capture: Capture, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs

    def enter(
        self, capture: Capture, layer: nn.Layer, trained: list[tuple[str, Tensor]], args: tuple, kwargs: dict
    ) -> None:
        self.take_over(capture, layer, {id(parameter) for _, parameter in trained})

    def take_over(self, capture: Capture, layer: nn.Layer, wanted: Collection[int]) -> None:
        """Puts a kernel that hands out factors in the place of Paddle's, until :meth:`after`."""
        if not layer.could_use_cudnn:
            return
        me = weakref.ref(self)
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
        return None

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
