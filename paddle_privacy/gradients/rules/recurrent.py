"""Recurrent layers: per-sample gradients from the gradients of the pre-activations at every step.

With u = x W_ihᵀ + b_ih and v = h₋ W_hhᵀ + b_hh the gates are functions of (u, v), so
∂W_ih = Σₜ ∂uₜ xₜᵀ, ∂b_ih = Σₜ ∂uₜ, ∂W_hh = Σₜ ∂vₜ h₋ₜᵀ, ∂b_hh = Σₜ ∂vₜ: outer products over the steps of one sequence.

The cells are ordinary rules. `nn.SimpleRNN`, `nn.LSTM` and `nn.GRU` run Paddle's fused kernel, which tells no
pre-activation gradients; :func:`run_fused` takes its place while the layer runs: the same kernel forward, one layer and
direction at a time, and a backward that computes the gates of all steps in one product and then runs the recurrence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.autograd import PyLayer

from paddle_privacy.gradients.factors import Dense, Outer, widen
from paddle_privacy.gradients.rules.linear import sum_over_positions
from paddle_privacy.gradients.rules.registry import Lazy, register_grad_rule

FUSED = (nn.SimpleRNN, nn.LSTM, nn.GRU)


# Gates. Everything below works on [..., gates · H], for one step or for all of them at once.


class Gates:
    """The derivatives of one kind of cell, linearised at given pre-activations.

    :meth:`back` maps the gradients of the state after a step to those of v and of the state before it;
    :meth:`input_side` gives the gradient of u where the cell is `coupled`: where u and v enter otherwise than by their
    sum. Only what these read is held.
    """

    read_by_step: tuple[str, ...] = ()
    coupled = False

    def back(self, t: Any, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(∂v, the part of ∂h₋ that does not come through v, ∂c₋) at step `t`."""
        raise AssertionError("each kind of cell has its own")

    def by_step(self) -> None:
        """Splits what :meth:`back` reads into its steps at once: an index costs as much as an addition."""
        for name in self.read_by_step:
            setattr(self, name, getattr(self, name).unbind(0))

    def input_side(self, dh: Tensor) -> Tensor:
        """∂u."""
        raise AssertionError("equal to that of v")


class SimpleGates(Gates):
    """h = φ(u + v), φ = tanh or relu."""

    read_by_step = ("slope",)

    def __init__(self, sums: Iterator[tuple[Tensor, Tensor]], relu: bool = False):
        u, v = next(sums)
        z = u.add_(v)
        self.slope = (z > 0).astype(z.dtype) if relu else 1.0 - z.tanh_().square_()

    def back(self, t: Any, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return dh * self.slope[t], None, None


class LSTMGates(Gates):
    """c = σ(f) c₋ + σ(i) tanh(g), h = σ(o) tanh(c) (Hochreiter and Schmidhuber 1997; gate order i, f, g, o)."""

    read_by_step = ("cell_slope", "slopes", "forget")

    def __init__(self, sums: Iterator[tuple[Tensor, Tensor]], c: Tensor, sequence: bool):
        """`c` is the state before the step or, of a sequence, before its first step."""
        i, f, g, o = (u.add_(v) for u, v in sums)
        i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
        update = i * g
        if sequence:
            states = _cell_states(f, update, c)
            before, squashed = states[:-1], paddle.tanh(states[1:])
        else:
            before, squashed = c, paddle.tanh(update + f * c)
        self.forget = f
        self.hidden = o * squashed
        self.cell_slope = o - self.hidden * squashed
        # In place where the operand has been read for the last time.
        di = update - update * i
        df = (f - f.square()).multiply_(before)
        dg = i.subtract_(update.multiply_(g))
        do = self.hidden - self.hidden * o
        self.slopes = paddle.concat([di, df, dg, do], axis=-1)

    def back(self, t: Any, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dc = dh * self.cell_slope[t] + dc if dc is not None else dh * self.cell_slope[t]
        return paddle.concat([dc, dc, dc, dh], axis=-1).multiply_(self.slopes[t]), None, dc * self.forget[t]


class GRUGates(Gates):
    """h = z h₋ + (1 − z) tanh(uₙ + σ(r) vₙ) (Cho et al. 2014, reset after the product; gate order r, z, n)."""

    read_by_step = ("slopes", "keep")
    coupled = True

    def __init__(self, sums: Iterator[tuple[Tensor, Tensor]], h: Tensor):
        (ur, vr), (uz, vz), (un, vn) = sums
        r, self.keep = ur.add_(vr).sigmoid_(), uz.add_(vz).sigmoid_()
        n = un.add_(r * vn).tanh_()
        candidate = (1.0 - self.keep).multiply_(1.0 - n.square())
        update = (h - n).multiply_(self.keep - self.keep.square())
        reset = (r - r.square()).multiply_(vn).multiply_(candidate)
        self.input_slopes = paddle.concat([reset, update, candidate], axis=-1)
        self.slopes = paddle.concat([reset, update, candidate.multiply_(r)], axis=-1)

    def back(self, t: Any, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return paddle.concat([dh, dh, dh], axis=-1).multiply_(self.slopes[t]), dh * self.keep[t], None

    def input_side(self, dh: Tensor) -> Tensor:
        return paddle.concat([dh, dh, dh], axis=-1).multiply_(self.input_slopes)


GATES = {"LSTM": 4, "GRU": 3}


def gates(mode: str, x: Tensor, h: Tensor, c: Tensor | None, weights: Sequence[Tensor | None], sequence: bool) -> Gates:
    """A cell linearised at inputs `x` and states `h`, for one step or for all steps of a sequence at once.

    `c` is an LSTM's other state before the (first) step.
    """
    sums = pre_activations(GATES.get(mode, 1), x, h, weights)
    if mode == "LSTM":
        assert c is not None
        return LSTMGates(sums, c, sequence)
    return GRUGates(sums, h) if mode == "GRU" else SimpleGates(sums, relu=mode == "RNN_RELU")


def pre_activations(
    count: int, x: Tensor, h: Tensor, weights: Sequence[Tensor | None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(u, v) of one gate after the other, in memory of their own."""
    split = [[None] * count if w is None else w.chunk(count) for w in weights]
    for weight_ih, weight_hh, bias_ih, bias_hh in zip(*split):
        yield affine(x, weight_ih, bias_ih), affine(h, weight_hh, bias_hh)


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = paddle.matmul(x, weight, transpose_y=True)
    return y if bias is None else y.add_(bias)


def products(du: Tensor, dv: Tensor, x: Tensor, h: Tensor) -> dict[str, Lazy]:
    """The factors of a cell's four parameters from [B, T, ·] tensors."""
    input_sum = functools.lru_cache(maxsize=None)(lambda: Dense(sum_over_positions(du)))
    return {
        "weight_ih": lambda: Outer(du, x),
        "weight_hh": lambda: Outer(dv, h),
        "bias_ih": input_sum,
        "bias_hh": input_sum if dv is du else lambda: Dense(sum_over_positions(dv)),
    }


# Cells, called step by step.


@register_grad_rule(nn.SimpleRNNCell, nn.LSTMCell, nn.GRUCell, many_outputs=True)
def cell(layer: Any, inputs: tuple, output_grad: Any) -> dict[str, Lazy]:
    """One step. `output_grad` holds ∂h and, for an LSTM, ∂c, ``None`` where that output reaches no loss."""
    x = widen(inputs[0])
    batch = x.shape[0]
    states = inputs[1] if len(inputs) > 1 and inputs[1] is not None else None
    if isinstance(layer, nn.LSTMCell):
        mode = "LSTM"
        width = layer.proj_size or layer.hidden_size
        h, c = states if states is not None else (paddle.zeros([batch, n], x.dtype) for n in (width, layer.hidden_size))
        dh, dc = output_grad
    else:
        mode = "GRU" if isinstance(layer, nn.GRUCell) else f"RNN_{layer.activation.upper()}"
        h, c = (states if states is not None else paddle.zeros([batch, layer.hidden_size], x.dtype)), None
        dh, dc = output_grad[0], None
    h = widen(h)
    weights = [
        None if w is None else widen(w) for w in (layer.weight_ih, layer.weight_hh, layer.bias_ih, layer.bias_hh)
    ]
    linearised = gates(mode, x, h, c if c is None else widen(c), weights, sequence=False)
    made: dict[str, Lazy] = {}
    if getattr(layer, "proj_size", 0):
        assert isinstance(linearised, LSTMGates)
        projected, hidden = dh, linearised.hidden
        if projected is None:
            projected = paddle.zeros([batch, layer.proj_size], x.dtype)
        made["weight_ho"] = lambda: Outer(hidden.unsqueeze(1), widen(projected).unsqueeze(1))
        dh = paddle.matmul(widen(projected), widen(layer.weight_ho), transpose_y=True)
    dh = paddle.zeros([batch, layer.hidden_size], x.dtype) if dh is None else widen(dh)
    dv, _, _ = linearised.back(..., dh, None if dc is None else widen(dc))
    dv = dv.unsqueeze(1)
    du = linearised.input_side(dh).unsqueeze(1) if linearised.coupled else dv
    made.update(products(du, dv, x.unsqueeze(1), h.unsqueeze(1)))
    return made


# The fused layers.


class Direction:
    """One layer and direction of a fused recurrent layer: its cell and what to do with its factors."""

    def __init__(self, layer: Any, cell: Any, lengths: Tensor | None, keep: Callable[[Any, dict[str, Lazy]], None]):
        self.mode, self.cell, self.lengths, self.keep = layer.mode, cell, lengths, keep
        self.dropout_state = layer._dropout_state
        self.weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]


class Recurrence(PyLayer):
    """Paddle's kernel forward over [T, B, ·]; backward by the recurrence, handing the factors on its way."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, x: Tensor, h0: Tensor, c0: Tensor | None, direction: Direction) -> tuple:
        """`trigger` wants a gradient where nothing else does, so that backward runs there too."""
        states = [s.unsqueeze(0) for s in (h0, c0) if s is not None]
        cell = direction.cell
        kernel: Any = paddle._C_ops.rnn
        out, _, last = kernel(
            x,
            states,
            direction.weights,
            direction.lengths,
            direction.dropout_state,
            0.0,
            False,
            x.shape[2],
            cell.hidden_size,
            1,
            direction.mode,
            0,
            True,
        )
        ctx.direction, ctx.has_cell = direction, c0 is not None
        ctx.wanted = [not t.stop_gradient for t in (trigger, x, h0, c0) if t is not None]
        # Not by save_for_backward: recompute would give back tensors of another run.
        ctx.kept = (x.detach(), h0.detach(), None if c0 is None else c0.detach(), out.detach())
        return (out, *(s.squeeze(0) for s in last))

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> tuple:
        x, h0, c0, out = ctx.kept
        direction = ctx.direction
        weight_ih, weight_hh = direction.weights[:2]
        steps = x.shape[0]
        dout, dh, dc = output_grads[0], output_grads[1], (output_grads[2] if ctx.has_cell else None)
        valid = None
        if direction.lengths is not None:
            valid = paddle.arange(steps).unsqueeze(1) < direction.lengths.astype("int64").unsqueeze(0)
            valid = valid.unsqueeze(-1)
            dout = paddle.where(valid, dout, paddle.zeros_like(dout))
        # Valid steps have valid predecessors, so the outputs are the states where it matters.
        before = paddle.concat([h0.unsqueeze(0), out[:-1]])
        linearised = gates(direction.mode, x, before, c0, direction.weights, sequence=True)
        linearised.by_step()
        douts = dout.unbind(0)
        dvs: list[Tensor] = []
        dhs: list[Tensor] = []
        for t in reversed(range(steps)):
            total = douts[t] + dh
            dv, passed, dc_before = linearised.back(t, total, dc)
            through = paddle.matmul(dv, weight_hh)
            dh_before = through if passed is None else through + passed
            if valid is not None:
                dh_before = paddle.where(valid[t], dh_before, dh)
                dv = paddle.where(valid[t], dv, paddle.zeros_like(dv))
                total = paddle.where(valid[t], total, paddle.zeros_like(total))
                if dc is not None:
                    dc_before = paddle.where(valid[t], dc_before, dc)
            dvs.append(dv)
            if linearised.coupled:
                dhs.append(total)
            dh, dc = dh_before, dc_before
        du = linearised.input_side(paddle.stack(dhs[::-1])) if linearised.coupled else None
        # The derivatives go before the gradients of all steps are put together.
        del linearised, dhs
        dv_all = paddle.stack(dvs[::-1], axis=1)
        del dvs
        # Batch first, and laid out so: the factors read them twice.
        x_all, before_all = (y.transpose([1, 0, 2]).contiguous() for y in (x, before))
        du_all = dv_all if du is None else du.transpose([1, 0, 2]).contiguous()
        direction.keep(direction.cell, products(du_all, dv_all, x_all, before_all))
        _, wants_x, *_ = ctx.wanted
        dx = paddle.matmul(du_all, weight_ih).transpose([1, 0, 2]) if wants_x else None
        made = [paddle.zeros([1], x.dtype), dx, dh, dc]
        return tuple(g if wants else None for g, wants in zip(made, ctx.wanted))


def _cell_states(forget: Tensor, update: Tensor, c0: Tensor) -> Tensor:
    """[T + 1, B, H]: the LSTM's cell state before each step and after the last, from [T, B, H]."""
    states = [c0]
    for kept, added in zip(forget.unbind(0), update.unbind(0)):
        states.append(kept * states[-1] + added)
    return paddle.stack(states)


def run_fused(
    layer: Any,
    inputs: Tensor,
    initial_states: Any,
    sequence_length: Tensor | None,
    keep: Callable[[Any, dict[str, Lazy]], None],
) -> tuple:
    """What ``layer._cudnn_impl`` computes, with `keep` called for each cell with its factors in the backward pass."""
    x = inputs if layer.time_major else inputs.transpose([1, 0, 2])
    trigger = paddle.zeros([1], x.dtype)
    # Only where nothing else does: paddle.grad cannot pass a PyLayer some of whose inputs it was not asked for.
    trigger.stop_gradient = not all(t.stop_gradient for t in (x, *initial_states))
    directions = layer.num_directions
    last: list[tuple] = []
    for k in range(layer.num_layers):
        if k:
            x = F.dropout(x, layer.dropout, training=layer.training, mode="upscale_in_train")
        outputs = []
        cells = [layer[k].cell] if directions == 1 else [layer[k].cell_fw, layer[k].cell_bw]
        for d, one in enumerate(cells):
            first = [s[k * directions + d] for s in initial_states]
            h0, c0 = first[0], (first[1] if len(first) > 1 else None)
            order = _reversal(x, sequence_length) if d else None
            sequence = _reordered(x, order)
            out, *final = Recurrence.apply(trigger, sequence, h0, c0, Direction(layer, one, sequence_length, keep))
            outputs.append(_reordered(out, order))
            last.append(tuple(final))
        x = outputs[0] if directions == 1 else paddle.concat(outputs, axis=-1)
    states = tuple(paddle.stack(parts) for parts in zip(*last))
    out = x if layer.time_major else x.transpose([1, 0, 2])
    return out, states if len(states) > 1 else states[0]


def _reversal(x: Tensor, lengths: Tensor | None) -> Tensor:
    """[T, B]: for each step the step that stands in its place when each sequence's valid part is reversed."""
    steps, batch = x.shape[:2]
    step = paddle.arange(steps).unsqueeze(1)
    if lengths is None:
        return (steps - 1 - step).expand([steps, batch])
    lengths = lengths.astype("int64").unsqueeze(0)
    return paddle.where(step < lengths, lengths - 1 - step, step.expand([steps, batch]))


def _reordered(x: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return x
    return paddle.take_along_axis(x, order.unsqueeze(-1).expand(x.shape), axis=0, broadcast=False)
