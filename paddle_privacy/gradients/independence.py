"""Does any sample's data reach another sample's gradient? Tried out, on the user's own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_privacy.errors import PrivacyError
from paddle_privacy.gradients.hooks import hooks_paused, map_tensors, tensors
from paddle_privacy.gradients.per_sample import gradients_kept
from paddle_privacy.gradients.probe import batch_axis, fingerprints, model_buffers_kept, random_state, set_random_state

# Of a tensor's largest row. A coupling through a mean over n rows is of order 1/n.
_ROUNDING = 1e-6
# What labels and masks are set to, to give one sample fewer tokens: ignore_index as people choose it, a mask's zero.
_IGNORED = (-100, -1, 0)


def check_independence(model: nn.Layer, loss_fn: Callable[..., Tensor], *batch: Any) -> None:
    """Replaces the samples of `batch` one at a time and proves that no other sample's gradient moves.

    Every layer's inputs, outputs and output gradients are compared row by row (the gradient of sample i is made of
    these and of nothing else), with the same random state throughout. Where the batch holds integer labels ``[B, T]``
    that no embedding reads, or a mask of zeros and ones, half of one sample's are also set to -100, -1 and 0 in turn
    (the usual ``ignore_index``), so that a mean over tokens is found even if every sample has as many of them.

    Args:
        model: in the mode in which it is trained. Parameters, buffers, ``.grad`` and random states are left alone.
        loss_fn: ``loss_fn(model, *batch)`` returns the scalar loss of the training loop, or one loss a row (``[B]``).
        batch: what the loop passes, the batch on the first axis of every tensor; at least two rows that differ. A
            handful of rows is enough: the check runs two or more forwards and backwards for every row.

    Raises:
        PrivacyError: a sample's data moves another one's gradient; the message names the first layer that couples
            them, or the loss.
        ValueError: the batch has fewer than two rows, or its rows are all equal.

    What was proven holds for this batch and this structure: a model that branches on its data is proven for the branch
    that was taken.
    """
    leaves = [x for x in tensors(batch) if x.ndim]
    if not leaves or leaves[0].shape[0] < 2:
        raise ValueError("batch must hold at least two rows on the first axis of its tensors")
    rows = leaves[0].shape[0]
    run = _Run(model, loss_fn, rows)
    with hooks_paused(), gradients_kept(model.parameters()):
        reference = run.trace(batch)
        again = run.trace(batch)
        if _first_moved(reference, again, [], rows) is not None:
            raise PrivacyError(
                "the model or the loss computes something else when it is run again on the same batch and random "
                "state, so nothing can be proven; make it deterministic (a random source other than Paddle's, NumPy's "
                "or Python's, or state kept between calls)"
            )
        tried = False
        for k in range(rows):
            for what, edited in _edits(batch, k, rows, reference):
                try:
                    moved = run.trace(edited)
                except Exception:
                    if what == "replaced":
                        raise
                    # The labels do not allow it.
                    continue
                tried = True
                found = _first_moved(reference, moved, [k], rows)
                if found is not None:
                    _refuse(found, k, what)
    if not tried:
        raise ValueError("batch must hold rows that differ, or replacing one shows nothing")


class _Record:
    """A layer's inputs as it begins, or its outputs as it ends and later their gradients: fingerprints [rows, 2]."""

    def __init__(self, path: str, kind: str, where: str, values: list[np.ndarray]):
        self.path, self.kind, self.where, self.values = path, kind, where, values
        self.gradients: dict[int, np.ndarray] = {}


class _Trace:
    """Records in the order of the computation."""

    def __init__(self) -> None:
        self.records: list[_Record] = []
        self.embedded: list[Tensor] = []


class _Run:
    """Runs the model, or the model and its loss, with every layer watched."""

    def __init__(self, model: nn.Layer, loss_fn: Callable[..., Tensor] | None, rows: int, state: tuple | None = None):
        self.model, self.loss_fn, self.rows = model, loss_fn, rows
        self.state = random_state() if state is None else state

    def trace(self, batch: Any) -> _Trace:
        trace = _Trace()
        handles = []
        seen: set[int] = set()
        for path, layer in self.model.named_sublayers(include_self=True):
            # A container's own input and output are those of its parts, which are named more precisely. What it
            # computes itself, between its parts, shows in the input of the next one.
            if id(layer) not in seen and (layer is self.model or not list(layer.children())):
                seen.add(id(layer))
                handles += self._watch(trace, path or type(layer).__name__, layer)
        state = random_state()
        set_random_state(self.state)
        try:
            with model_buffers_kept(self.model):
                if self.loss_fn is None:
                    with paddle.no_grad():
                        args, kwargs = batch
                        self.model(*args, **kwargs)
                else:
                    loss = self.loss_fn(self.model, *batch)
                    if not isinstance(loss, Tensor):
                        raise TypeError(f"loss_fn must return a tensor, found {type(loss).__name__}")
                    (loss if loss.ndim == 0 else loss.sum()).backward()
        finally:
            set_random_state(state)
            for handle in handles:
                handle.remove()
        return trace

    def _watch(self, trace: _Trace, path: str, layer: nn.Layer) -> list:
        kind = type(layer).__name__
        axis = batch_axis(layer)

        def prints(x: Tensor) -> np.ndarray:
            with paddle.no_grad():
                return fingerprints(x.detach(), axis).numpy()

        def batched(tree: Any) -> list[Tensor]:
            return [x for x in tensors(tree) if x.ndim > axis and x.shape[axis] == self.rows]

        def keep_in(record: _Record, k: int) -> Callable[[Tensor], None]:
            def keep(gradient: Tensor) -> None:
                record.gradients[k] = prints(gradient)

            return keep

        def before(layer: nn.Layer, args: tuple, kwargs: dict) -> None:
            trace.records.append(_Record(path, kind, "inputs", [prints(x) for x in batched((args, kwargs))]))
            if isinstance(layer, nn.Embedding):
                trace.embedded += list(tensors((args, kwargs)))

        def after(layer: nn.Layer, args: tuple, kwargs: dict, output: Any) -> None:
            outputs = batched(output)
            record = _Record(path, kind, "outputs", [prints(x) for x in outputs])
            trace.records.append(record)
            for k, x in enumerate(outputs):
                if not x.stop_gradient:
                    x.register_hook(keep_in(record, k))

        return [
            layer.register_forward_pre_hook(before, with_kwargs=True),  # type: ignore[arg-type]
            layer.register_forward_post_hook(after, with_kwargs=True),  # type: ignore[arg-type]
        ]


class _Moved:
    def __init__(self, record: _Record | None, where: str, other: int):
        self.record, self.where, self.other = record, where, other


def _first_moved(a: _Trace, b: _Trace, touched: list[int], rows: int) -> _Moved | None:
    """The first record, in the order of the computation, in which a row that was not touched moved."""
    for mine, theirs in zip(a.records, b.records):
        if (mine.path, mine.where) != (theirs.path, theirs.where):
            return _Moved(mine, "order", -1)
        other = _moved_row(mine.values, theirs.values, touched, rows)
        if other is not None:
            return _Moved(mine, mine.where, other)
    if len(a.records) != len(b.records):
        return _Moved(None, "order", -1)
    # Backwards: the record nearest to the loss that moved is where the coupling enters.
    for mine, theirs in zip(reversed(a.records), reversed(b.records)):
        if mine.gradients.keys() != theirs.gradients.keys():
            return _Moved(mine, "gradient", -1)
        keys = sorted(mine.gradients)
        other = _moved_row([mine.gradients[k] for k in keys], [theirs.gradients[k] for k in keys], touched, rows)
        if other is not None:
            return _Moved(mine, "gradient", other)
    return None


def _moved_row(mine: list[np.ndarray], theirs: list[np.ndarray], touched: list[int], rows: int) -> int | None:
    if [x.shape for x in mine] != [x.shape for x in theirs]:
        return next((i for i in range(rows) if i not in touched), None)
    for x, y in zip(mine, theirs):
        scale = np.nanmax(np.abs(x), initial=0.0, where=np.isfinite(x))
        same = (x == y) | (np.isnan(x) & np.isnan(y)) | (np.abs(x - y) <= _ROUNDING * scale)
        for i in np.nonzero(~same.all(axis=1))[0]:
            if int(i) not in touched:
                return int(i)
    return None


def _edits(batch: tuple, k: int, rows: int, reference: _Trace) -> Iterator[tuple[str, tuple]]:
    """The batch with sample k replaced, and with half of sample k's labels ignored."""
    batched = [x for x in tensors(batch) if x.ndim and x.shape[0] == rows]
    other = next(
        ((k + j) % rows for j in range(1, rows) if any(not bool((x[k] == x[(k + j) % rows]).all()) for x in batched)),
        None,
    )
    if other is not None:
        yield (
            "replaced",
            map_tensors(lambda x: _row_set(x, k, x[other : other + 1]) if x.ndim and x.shape[0] == rows else x, batch),
        )
    for target in batched:
        if target.ndim < 2 or _is_embedded(target, reference):
            continue
        for value in _ignored_values(target):
            half = target[k : k + 1].clone()
            half[:, : max(1, half.shape[1] // 2)] = bool(value) if target.dtype == paddle.bool else value
            yield "masked", _with_row(batch, target, k, half)


def _with_row(batch: tuple, target: Tensor, k: int, row: Tensor) -> tuple:
    return map_tensors(lambda x: _row_set(x, k, row) if x is target else x, batch)


def _ignored_values(target: Tensor) -> list[int]:
    if target.dtype == paddle.bool or (target.is_floating_point() and bool(((target == 0) | (target == 1)).all())):
        return [0]
    if target.dtype not in (paddle.int64, paddle.int32):
        return []
    # A label that is no class ends a CUDA process; on a GPU only values that the batch holds already are tried.
    safe = target.place.is_cpu_place()
    return [value for value in _IGNORED if value == 0 or safe or bool((target == value).any())]


def _is_embedded(x: Tensor, reference: _Trace) -> bool:
    """Whether an embedding reads these ids, so that -100 would be no row of its table."""
    return any(e.shape == x.shape and e.dtype == x.dtype and bool((e == x).all()) for e in reference.embedded)


def _row_set(x: Tensor, k: int, row: Tensor) -> Tensor:
    made = paddle.concat([x[:k].detach(), row.detach(), x[k + 1 :].detach()])
    made.stop_gradient = x.stop_gradient
    return made


def _refuse(moved: _Moved, k: int, what: str) -> None:
    did = f"replacing sample {k}" if what == "replaced" else f"ignoring some tokens of sample {k}"
    advice = (
        "use layers that work within one sample (GroupNorm, LayerNorm) and a loss that is a mean of one loss a row, "
        "each a mean over that row's own tokens"
    )
    if moved.where == "order" or moved.record is None:
        raise PrivacyError(
            f"samples are coupled: {did} changed which layers run for the whole batch; branch within one sample, or "
            "run both branches and select by row"
        )
    layer = f"layer '{moved.record.path}' ({moved.record.kind})"
    if moved.where == "inputs":
        raise PrivacyError(
            f"samples are coupled before {layer}: {did} moved its input for sample {moved.other}; {advice}"
        )
    if moved.where == "outputs":
        raise PrivacyError(f"samples are coupled by {layer}: {did} moved its output for sample {moved.other}; {advice}")
    raise PrivacyError(
        f"samples are coupled by the loss: {did} moved the gradient of sample {moved.other} at {layer}, the last "
        f"layer before it; {advice}"
    )


def first_mixing_layer(
    model: nn.Layer, inputs: Any, edited: Any, rows: int, touched: list[int], state: tuple
) -> str | None:
    """The layer, as "'path' (Kind)", whose output moved in a row that is not `touched` although its input had not."""
    run = _Run(model, None, rows, state)
    with hooks_paused():
        a, b = run.trace(inputs), run.trace(edited)
    moved = _first_moved(a, b, touched, rows)
    if moved is None or moved.record is None or moved.where != "outputs":
        return None
    return f"'{moved.record.path}' ({moved.record.kind})"
