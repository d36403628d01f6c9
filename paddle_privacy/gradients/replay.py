"""Per-sample gradients of a layer without a rule: the forward again, one sample at a time.

*Replay*: the layer runs on row i of its recorded inputs; if that reproduces row i of the recorded outputs (so the layer
keeps samples apart and is not random), the recorded output gradient of row i is sent back through it. B small forward
and backward passes, the microbatch jacobian.

*Rows*: a layer with dropout inside cannot be run again. The recorded graph itself is differentiated B times, each time
with the output gradient of one row. Costs B backward passes of the layer, and is exact for whatever was drawn.

Both send the gradient of one output tensor at a time: the per-sample gradient is linear in the output gradients.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_privacy.errors import UnsupportedLayer
from paddle_privacy.gradients.hooks import hooks_paused, map_tensors, tensors
from paddle_privacy.gradients.probe import model_buffers_kept, random_state, set_random_state
from paddle_privacy.gradients.rules.registry import Lazy
from paddle_privacy.gradients.stand_in import stand_in
from paddle_privacy.gradients.tap import Call, Tap, own_node
from paddle_privacy.gradients.trial import close, gradients

_KEPT_GRAPHS = 16


class ForwardAgain:
    """Runs a layer's forward again as in the recorded call: parameters replaced, precision and random state as then."""

    def __init__(self, layer: nn.Layer, slots: Sequence[tuple[nn.Layer, str]], args: tuple, kwargs: dict, rows: int):
        self.layer, self.slots, self.rows = layer, list(slots), rows
        self.args, self.kwargs = map_tensors(lambda x: x.detach(), (args, kwargs))
        self.random_state = random_state()
        self.amp = _AmpState()

    def __call__(self, values: Sequence[Tensor]) -> list[Tensor]:
        """All rows, with `values` in the parameters' places."""
        return self._run(self.args, self.kwargs, values)

    def row(self, i: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Row i alone. Inputs whose first axis is not the batch are shared by all samples."""
        args, kwargs = map_tensors(
            lambda x: x[i : i + 1] if x.ndim and x.shape[0] == self.rows else x, (self.args, self.kwargs)
        )
        return self._run(args, kwargs, values)

    def _run(self, args: tuple, kwargs: dict, values: Sequence[Tensor]) -> list[Tensor]:
        before = random_state()
        held = [layer._parameters[name] for layer, name in self.slots]
        for (layer, name), value in zip(self.slots, values):
            layer._parameters[name] = value
        set_random_state(self.random_state)
        try:
            with hooks_paused(), model_buffers_kept(self.layer), self.amp.again(), no_recompute_hooks():
                return list(tensors(self.layer.forward(*args, **kwargs)))
        finally:
            for (layer, name), parameter in zip(self.slots, held):
                layer._parameters[name] = parameter
            set_random_state(before)


@contextmanager
def no_recompute_hooks() -> Iterator[None]:
    """Graphs made inside keep their tensors, also where non-reentrant recompute is about to throw tensors away.

    Paddle allows one pair of saved-tensor hooks at a time and does not say which; recompute's is in its frame.
    """
    frame, pair = sys._getframe(), None
    while frame is not None and pair is None:
        if frame.f_code.co_name == "_recompute_without_reentrant" and "unpack" in frame.f_locals:
            pair = frame.f_locals["pack"], frame.f_locals["unpack"]
        frame = frame.f_back  # type: ignore[assignment]
    if pair is None:
        yield
        return
    eager = paddle.base.core.eager
    eager.reset_saved_tensors_hooks()
    try:
        yield
    finally:
        eager.register_saved_tensors_hooks(*pair)


class _AmpState:
    """The automatic mixed precision of this moment, to be entered again in the backward pass."""

    def __init__(self) -> None:
        tracer = paddle.base.framework._dygraph_tracer()
        self.level, self.dtype = tracer._amp_level, tracer._amp_dtype
        self.white, self.black = tracer._get_amp_op_list()

    @contextmanager
    def again(self) -> Iterator[None]:
        levels = paddle.base.core.AmpLevel
        with paddle.amp.auto_cast(
            enable=self.level in (levels.O1, levels.O2),
            custom_white_list=self.white,
            custom_black_list=self.black,
            level="O2" if self.level == levels.O2 else "O1",
            dtype=self.dtype if self.dtype in ("float16", "bfloat16") else "float16",
        ):
            yield


def is_random(forward: ForwardAgain, parameters: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether the layer computes something else from another random state."""
    now, then = random_state(), forward.random_state
    set_random_state(then)
    paddle.rand([1])
    np.random.rand()
    random.random()
    forward.random_state = random_state()
    try:
        with paddle.no_grad():
            again = forward([stand_in(p) for p in parameters])
    finally:
        forward.random_state = then
        set_random_state(now)
    return len(again) != len(outputs) or not all(close(a, b) for a, b in zip(again, outputs))


def replay(
    forward: ForwardAgain,
    parameters: Sequence[Tensor],
    wanted: Sequence[int],
    outputs: Sequence[Tensor],
    which: int,
    output_grad: Tensor,
    description: str,
) -> list[Tensor]:
    """[B, *shape] for each of the `wanted` among the layer's parameters, from the gradient of ``outputs[which]``.

    Raises:
        UnsupportedLayer: running one row does not reproduce that row of the outputs.
    """
    collected: list[list[Tensor]] = [[] for _ in wanted]
    for i in range(forward.rows):
        values = [stand_in(p) for p in parameters]
        leaves = [values[k] for k in wanted]
        with paddle.enable_grad():
            alone = forward.row(i, values)
        if not _reproduces(alone, outputs, i, forward.rows):
            raise UnsupportedLayer(
                f"{description}: has no gradient rule, and running it on one sample alone does not reproduce what it "
                "computed in the batch (it mixes samples, is random, or keeps a state); freeze its parameters, move "
                "them into a layer that has a rule, or register one with register_grad_rule"
            )
        weight = output_grad[i : i + 1].reshape(alone[which].shape)
        made = gradients([alone[which]], leaves, [*values, *forward.layer.parameters()], [weight])
        for store, gradient, leaf in zip(collected, made, leaves):
            store.append(paddle.zeros_like(leaf) if gradient is None else gradient)
    return [paddle.stack(rows) for rows in collected]


class RowByRow:
    """Asks for the gradients of outputs whose graph will be differentiated row by row.

    Holds the outputs until their gradients arrive: Paddle's hooks must not own the tensor that they are on.
    """

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def ask(
        self,
        tap: Tap,
        output: Any,
        leaves: Mapping[int, Tensor],
        others: Sequence[Tensor],
        rows: int,
        batch_inputs: list[Tensor],
        what: str,
    ) -> Any:
        """Per-sample gradients of `leaves` (by the id of their parameter) from every tensor in `output`.

        `others`: everything else below the output that may want a gradient.

        Returns:
            The output, some of its tensors replaced by equal ones.

        Raises:
            UnsupportedLayer: an output has no batch on its first axis.
        """
        replaced = {id(x): x for x in tensors(output)}
        for key, out in list(replaced.items()):
            if not out.stop_gradient:
                if not out.ndim or out.shape[0] != rows:
                    raise UnsupportedLayer(
                        f"{what} returns a tensor of shape {list(out.shape)} for {rows} samples; return batch first, "
                        "or freeze what it trains"
                    )
                replaced[key] = own_node(out)
                self._ask_one(tap, replaced[key], leaves, others, batch_inputs, what)
        return map_tensors(lambda x: replaced[id(x)], output)

    def _ask_one(
        self,
        tap: Tap,
        out: Tensor,
        leaves: Mapping[int, Tensor],
        others: Sequence[Tensor],
        batch_inputs: list[Tensor],
        what: str,
    ) -> None:
        call = Call((), {str(key): key for key in leaves}, batch_inputs)
        mark, kept = id(call), self.kept
        kept[mark] = out
        while len(kept) > _KEPT_GRAPHS:
            del kept[next(iter(kept))]

        def factors(gradient: Tensor) -> dict[str, Lazy]:
            top = kept.pop(mark, None)
            if top is None:
                raise UnsupportedLayer(
                    f"{what} ran more than {_KEPT_GRAPHS} times before its backward, and only the last graphs are "
                    "kept; call backward() more often"
                )
            made = row_gradients(top, list(leaves.values()), others, gradient)
            return {str(key): g for key, g in zip(leaves, made)}

        out.register_hook(lambda gradient: tap.arrive(call, lambda: factors(gradient)))


def row_gradients(
    output: Tensor, leaves: Sequence[Tensor], others: Sequence[Tensor], output_grad: Tensor
) -> list[Tensor]:
    """[B, *shape] for each leaf below `output`, by one backward pass of the kept graph for each row."""
    collected: list[list[Tensor]] = [[] for _ in leaves]
    for i in range(output.shape[0]):
        masked = paddle.zeros_like(output_grad)
        masked[i] = output_grad[i]
        made = gradients([output], leaves, others, [masked], keep_graph=True)
        for store, gradient, leaf in zip(collected, made, leaves):
            store.append(paddle.zeros_like(leaf) if gradient is None else gradient)
    return [paddle.stack(rows) for rows in collected]


def _reproduces(alone: Sequence[Tensor], outputs: Sequence[Tensor], i: int, rows: int) -> bool:
    return len(alone) == len(outputs) and all(
        b.ndim and b.shape[0] == rows and close(a, b[i : i + 1]) for a, b in zip(alone, outputs)
    )
