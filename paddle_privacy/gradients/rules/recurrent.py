"""Recurrent layers: per-sample gradients from the gradients of the pre-activations at every step.

With u = x W_ihᵀ + b_ih and v = h₋ W_hhᵀ + b_hh the gates are functions of (u, v), so
∂W_ih = Σₜ ∂uₜ xₜᵀ, ∂b_ih = Σₜ ∂uₜ, ∂W_hh = Σₜ ∂vₜ h₋ₜᵀ, ∂b_hh = Σₜ ∂vₜ: outer products over the steps of one sequence.

The cells are ordinary rules. `nn.SimpleRNN`, `nn.LSTM` and `nn.GRU` run Paddle's fused kernel, which tells no
pre-activation gradients; :func:`run_fused` takes its place while the layer runs: the same kernel forward, one layer and
direction at a time, and a backward that computes the gates of all steps in one product and then runs the recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.autograd import PyLayer

from paddle_privacy.gradients.factors import Dense, Outer, widen
from paddle_privacy.gradients.rules.registry import Lazy, register_grad_rule

FUSED = (nn.SimpleRNN, nn.LSTM, nn.GRU)


# Gates. Everything below works on [..., gates · H], for one step or for all of them at once.


class Gates:
    """The derivatives of one kind of cell, linearised at given pre-activations.

    `h` and `c` are the state before the step(s). :meth:`back` maps the gradients of the state after a step to those of
    v and of the state before it; :meth:`input_side` gives the gradient of u.
    """

    read_by_step: tuple[str, ...] = ()

    def __init__(self, u: Tensor, v: Tensor, h: Tensor, c: Tensor | None):
        self.h, self.c = h, c

    def back(self, t: Any, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(∂v, the part of ∂h₋ that does not come through v, ∂c₋) at step `t`."""
        raise AssertionError("each kind of cell has its own")

    def by_step(self) -> None:
        """Splits what :meth:`back` reads into its steps at once: an index costs as much as an addition."""
        for name in self.read_by_step:
            setattr(self, name, getattr(self, name).unbind(0))

    def input_side(self, dv: Tensor, dh: Tensor) -> Tensor:
        """∂u; equal to ∂v except in a GRU."""
        return dv


class SimpleGates(Gates):
    """h = φ(u + v), φ = tanh or relu."""

    read_by_step = ("slope",)

    def __init__(self, u: Tensor, v: Tensor, h: Tensor, c: Tensor | None, relu: bool = False):
        super().__init__(u, v, h, c)
        if relu:
            self.slope = (u + v > 0).astype(u.dtype)
        else:
            self.slope = 1.0 - paddle.tanh(u + v).square()

    def back(self, t: Any, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return dh * self.slope[t], None, None


class LSTMGates(Gates):
    """c = σ(f) c₋ + σ(i) tanh(g), h = σ(o) tanh(c) (Hochreiter and Schmidhuber 1997; gate order i, f, g, o)."""

    read_by_step = ("cell_slope", "slopes", "forget")

    def __init__(self, u: Tensor, v: Tensor, h: Tensor, c: Tensor, after: Tensor | None = None):
        super().__init__(u, v, h, c)
        i, f, g, o = (u + v).chunk(4, axis=-1)
        i, self.forget, o, g = F.sigmoid(i), F.sigmoid(f), F.sigmoid(o), paddle.tanh(g)
        if after is None:
            after = self.forget * c + i * g
        squashed = paddle.tanh(after)
        self.cell_slope = o * (1.0 - squashed.square())
        self.hidden = o * squashed
        f = self.forget
        self.slopes = paddle.concat(
            [g * i * (1.0 - i), c * f * (1.0 - f), i * (1.0 - g.square()), squashed * o * (1.0 - o)], axis=-1
        )

    def back(self, t: Any, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dc = dh * self.cell_slope[t] + dc if dc is not None else dh * self.cell_slope[t]
        return paddle.concat([dc, dc, dc, dh], axis=-1) * self.slopes[t], None, dc * self.forget[t]


class GRUGates(Gates):
    """h = z h₋ + (1 − z) tanh(uₙ + σ(r) vₙ) (Cho et al. 2014, reset after the product; gate order r, z, n)."""

    read_by_step = ("slopes", "keep")

    def __init__(self, u: Tensor, v: Tensor, h: Tensor, c: Tensor | None):
        super().__init__(u, v, h, c)
        (ur, uz, un), (vr, vz, vn) = u.chunk(3, axis=-1), v.chunk(3, axis=-1)
        r, self.keep = F.sigmoid(ur + vr), F.sigmoid(uz + vz)
        n = paddle.tanh(un + r * vn)
        candidate = (1.0 - self.keep) * (1.0 - n.square())
        update = (h - n) * self.keep * (1.0 - self.keep)
        reset = candidate * vn * r * (1.0 - r)
        self.input_slopes = paddle.concat([reset, update, candidate], axis=-1)
        self.slopes = paddle.concat([reset, update, candidate * r], axis=-1)

    def back(self, t: Any, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return paddle.concat([dh, dh, dh], axis=-1) * self.slopes[t], dh * self.keep[t], None

    def input_side(self, dv: Tensor, dh: Tensor) -> Tensor:
        return paddle.concat([dh, dh, dh], axis=-1) * self.input_slopes


def gates(mode: str, u: Tensor, v: Tensor, h: Tensor, c: Tensor | None) -> Gates:
    if mode == "LSTM":
        assert c is not None
        return LSTMGates(u, v, h, c)
    return GRUGates(u, v, h, c) if mode == "GRU" else SimpleGates(u, v, h, c, relu=mode == "RNN_RELU")


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = paddle.matmul(x, weight, transpose_y=True)
    return y if bias is None else y + bias


def products(du: Tensor, dv: Tensor, x: Tensor, h: Tensor) -> dict[str, Lazy]:
    """The factors of a cell's four parameters from [B, T, ·] tensors."""
    return {
        "weight_ih": lambda: Outer(du, x),
        "weight_hh": lambda: Outer(dv, h),
        "bias_ih": lambda: Dense(widen(du).sum(axis=1)),
        "bias_hh": lambda: Dense(widen(dv).sum(axis=1)),
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
    u = affine(x, widen(layer.weight_ih), layer.bias_ih)
    v = affine(h, widen(layer.weight_hh), layer.bias_hh)
    linearised = gates(mode, u, v, h, c if c is None else widen(c))
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
    du = linearised.input_side(dv, dh)
    made.update(products(*(y.unsqueeze(1) for y in (du, dv, x, h))))
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
        weight_ih, weight_hh, bias_ih, bias_hh = direction.weights
        steps = x.shape[0]
        dout, dh, dc = output_grads[0], output_grads[1], (output_grads[2] if ctx.has_cell else None)
        valid = None
        if direction.lengths is not None:
            valid = paddle.arange(steps).unsqueeze(1) < direction.lengths.astype("int64").unsqueeze(0)
            valid = valid.unsqueeze(-1)
            dout = paddle.where(valid, dout, paddle.zeros_like(dout))
        # Valid steps have valid predecessors, so the outputs are the states where it matters.
        before = paddle.concat([h0.unsqueeze(0), out[:-1]])
        u, v = affine(x, weight_ih, bias_ih), affine(before, weight_hh, bias_hh)
        linearised = gates(direction.mode, u, v, before, _cell_states(u + v, c0) if c0 is not None else None)
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
            dhs.append(total)
            dh, dc = dh_before, dc_before
        dv_all = paddle.stack(dvs[::-1])
        du = linearised.input_side(dv_all, paddle.stack(dhs[::-1]))
        batch_first = (y.transpose([1, 0, 2]) for y in (du, dv_all, x, before))
        direction.keep(direction.cell, products(*batch_first))
        _, wants_x, *_ = ctx.wanted
        made = [paddle.zeros([1], x.dtype), paddle.matmul(du, weight_ih) if wants_x else None, dh, dc]
        return tuple(g if wants else None for g, wants in zip(made, ctx.wanted))


def _cell_states(z: Tensor, c0: Tensor) -> Tensor:
    """[T, B, H]: the LSTM's cell state before each step."""
    i, f, g, _ = z.chunk(4, axis=-1)
    forget, update = F.sigmoid(f).unbind(0), (F.sigmoid(i) * paddle.tanh(g)).unbind(0)
    states = [c0]
    for t in range(z.shape[0] - 1):
        states.append(forget[t] * states[-1] + update[t])
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
