"""Finds by trial, once for a layer, how the parameters that it uses barely are captured.

The layer's forward is run again, on the inputs of the first batch and with the same random state, with stand-ins in the
parameters' places:

1. a parameter that the outputs' graph does not reach is not used here (its sublayer uses it, or another layer);
2. one that occurs only in products is captured there (:mod:`paddle_privacy.gradients.stand_in`);
3. one that can be given as one copy for each sample, where copy i moves row i of the output and exactly as the
   parameter itself would, is expanded. The proof is by values: the copies are perturbed differently, and the first
   and last row must come out as in runs where the parameter itself is perturbed so;
4. what is left is replayed sample by sample, or, where the layer is random, differentiated row by row
   (:mod:`paddle_privacy.gradients.replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor

from paddle_privacy.gradients.hooks import hooks_paused
from paddle_privacy.gradients.stand_in import ProductHook, StandIn, broadcasts, expanded, stand_in

# (values in the parameters' places) -> the layer's output tensors, with the random state as in the first run.
Run = Callable[[Sequence[Tensor]], list[Tensor]]

_MOST_AXES = 3


@dataclass(frozen=True)
class Strategy:
    """How one parameter is captured: "unused", "product", "expanded" (with `axes` ones), "replay" or "rows"."""

    kind: str
    axes: int = 0


def tolerance(x: Tensor) -> float:
    """How far the same value may be off, relative to the largest, when it is computed by other kernels."""
    return {paddle.float64: 1e-9, paddle.float32: 1e-4}.get(x.dtype, 5e-2)


def find_strategies(
    run: Run, parameters: Sequence[Tensor], rows: int, others: Sequence[Tensor] = ()
) -> list[Strategy | None]:
    """The strategy of each parameter; ``None`` where it has to be replayed or differentiated row by row.

    `others` are the other parameters of the layer; see :func:`gradients`.
    """
    products: set[int] = set()
    unusual: set[int] = set()
    stand_ins = [stand_in(p, _noting(products, unusual, k, rows)) for k, p in enumerate(parameters)]
    with paddle.enable_grad():
        outputs = run(stand_ins)
    members = [(k, member) for k, one in enumerate(stand_ins) for member in one.family()]
    reached = {k for (k, _), hit in zip(members, used(outputs, [member for _, member in members], others)) if hit}
    del outputs
    found: list[Strategy | None] = [
        None if k in reached | unusual else Strategy("product" if k in products else "unused")
        for k in range(len(parameters))
    ]
    left = [k for k, strategy in enumerate(found) if strategy is None]
    if left and rows > 1:
        with paddle.no_grad():
            for k in left:
                axes = _expansion(run, parameters, k, rows)
                found[k] = None if axes is None else Strategy("expanded", axes)
            if not _together(run, parameters, found, rows):
                found = [None if s is not None and s.kind == "expanded" else s for s in found]
    return found


def _noting(products: set[int], unusual: set[int], k: int, rows: int) -> ProductHook:
    def note(x: Tensor, y: Tensor, transposed: bool) -> None:
        (products if x.shape[0] == rows else unusual).add(k)

    return note


def gradients(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    others: Iterable[Tensor],
    output_grads: Sequence[Tensor] | None = None,
    keep_graph: bool = False,
) -> list[Tensor | None]:
    """``paddle.grad``, with `others` (whatever wants a gradient below the outputs) asked for too.

    Paddle 3.3's kernels take a parameter that nobody asks for to be frozen, whereupon the input gradient of a layer
    norm lacks its scale and that of a recurrent layer fails.
    """
    wanted = {id(x): x for x in leaves}
    wanted.update((id(x), x) for x in others if not x.stop_gradient)
    with hooks_paused():
        made = paddle.grad(
            list(outputs), list(wanted.values()), grad_outputs=output_grads, retain_graph=keep_graph, allow_unused=True
        )
    return made[: len(leaves)]


def used(outputs: Sequence[Tensor], leaves: Sequence[Tensor], others: Iterable[Tensor] = ()) -> list[bool]:
    """Which leaves the autograd graph of the outputs reaches.

    Asked of ``paddle.grad``, which skips what reaches none of them: reading ``Tensor.grad_fn`` would keep the graph
    alive for ever.
    """
    tops = list({id(x): x for x in outputs if not x.stop_gradient}.values())
    if not tops or not leaves:
        return [False] * len(leaves)
    return [gradient is not None for gradient in gradients(tops, leaves, others, keep_graph=True)]


def _perturbed(parameter: Tensor, seed: int, rows: int | None = None) -> Tensor:
    """The parameter moved by noise of its own size; [rows, *shape], each row moved differently, where asked."""
    values = parameter.astype("float64").numpy()
    shape = values.shape if rows is None else (rows, *values.shape)
    size = 0.1 * (float(np.sqrt(np.mean(values**2))) + 0.1) if values.size else 0.1
    moved = values + size * np.random.RandomState(seed).standard_normal(shape)
    return stand_in(paddle.to_tensor(moved, dtype=parameter.dtype, place=parameter.place), source=parameter)


def _expansion(run: Run, parameters: Sequence[Tensor], k: int, rows: int) -> int | None:
    """How many axes of one the copies of parameter `k` need behind the batch axis; ``None`` where no number fits."""
    others = [_perturbed(p, j) for j, p in enumerate(parameters)]
    copies = _perturbed(parameters[k], 1000 + k, rows)

    def like_k(values: Tensor) -> StandIn:
        return stand_in(values, source=parameters[k])

    def with_k(values: Tensor) -> list[Tensor]:
        return [*others[:k], values, *others[k + 1 :]]

    first, last = run(with_k(like_k(copies[0]))), run(with_k(like_k(copies[-1])))
    if not _moved(first, last):
        return None
    for axes in range(1 if broadcasts(parameters[k]) else _MOST_AXES + 1):
        shaped = copies.reshape(expanded(parameters[k], rows, axes).shape)
        try:
            together = run(with_k(like_k(shaped)))
        except Exception:
            # A shape that does not fit is what the trial is for.
            continue
        if _row_equal(together, first, 0, rows) and _row_equal(together, last, -1, rows):
            return axes
    return None


def _together(run: Run, parameters: Sequence[Tensor], found: list[Strategy | None], rows: int) -> bool:
    """Whether the layer still computes the same when all expanded parameters are expanded at once."""
    chosen = [k for k, s in enumerate(found) if s is not None and s.kind == "expanded"]
    if len(chosen) < 2:
        return True
    plain = run([stand_in(p) for p in parameters])
    values = [
        expanded(p, rows, s.axes) if s is not None and s.kind == "expanded" else stand_in(p)
        for p, s in zip(parameters, found)
    ]
    try:
        together = run(values)
    except Exception:
        return False
    return all(_row_equal(together, plain, row, rows) for row in (0, -1))


def _moved(first: list[Tensor], last: list[Tensor]) -> bool:
    """Whether the outputs tell the two perturbations apart, far above rounding."""
    for a, b in zip(first, last):
        if a.is_floating_point() and a.size:
            scale = float(a.abs().max().astype("float64")) + 1e-30
            if float((a - b).abs().max().astype("float64")) > 20 * tolerance(a) * scale:
                return True
    return False


def _row_equal(found: list[Tensor], wanted: list[Tensor], row: int, rows: int) -> bool:
    """Whether row `row` of every output is the same; an output of one row stands for all."""
    if len(found) != len(wanted):
        return False
    for a, b in zip(found, wanted):
        if not a.ndim or not b.ndim or a.shape[0] != rows or b.shape[0] not in (1, rows) or a.shape[1:] != b.shape[1:]:
            return False
        if not close(a[row], b[row if b.shape[0] == rows else 0]):
            return False
    return True


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding."""
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() or not a.size:
        return bool((a == b).all())
    limit = tolerance(a) * (float(b.abs().max().astype("float64")) + 1e-12)
    return bool(((a - b).abs().astype("float64") <= limit).all())
