"""Per-sample gradients outside of training: to look at them, to audit, to test a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_privacy.gradients.capture import Capture, Group
from paddle_privacy.gradients.factors import accumulation_dtype, merge
from paddle_privacy.gradients.hooks import hooks_only_of, hooks_paused, map_tensors, tensors
from paddle_privacy.gradients.locate import locate

MODES = ("auto", "microbatch", "vmap")


def per_sample_gradients(model: nn.Layer, loss_fn: Callable, *inputs: Any, mode: str = "auto") -> dict[str, Tensor]:
    """∂ℓᵢ/∂θ for every sample i and every trainable parameter θ of `model`.

    Args:
        model: any ``paddle.nn.Layer``; the weights, ``.grad`` and random state of the model are left as they were in
            modes ``"auto"`` and ``"microbatch"``, up to what dropout draws.
        loss_fn: ``loss_fn(model, *inputs)`` returns the [B] losses of the B samples.
        inputs: tensors, or nested lists, tuples and dicts of them, with the batch on the first axis; a tensor whose
            first axis is not B, and anything else, is shared by all samples.
        mode: ``"auto"``: one forward and one backward through the gradient rules that training uses;
            ``"microbatch"``: B separate backward passes, no rule involved; ``"vmap"``: ``paddle.vmap`` over samples.

    Returns:
        ``{parameter name: [B, *shape]}`` in float32 (float64 for float64 parameters), zeros where a sample does not
        reach the parameter. Names are those of ``model.named_parameters()``; a tied parameter has one entry.

    Raises:
        UnsupportedLayer: in mode ``"auto"``, a layer whose gradients cannot be told apart sample by sample.
        ValueError: `mode` is unknown, or ``"vmap"`` where this Paddle has no ``paddle.vmap``, or the loss is not [B].
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, found {mode!r}")
    if mode == "vmap" and not hasattr(paddle, "vmap"):
        raise ValueError(
            f"mode='vmap' needs paddle.vmap, which Paddle {paddle.__version__} does not have; use mode='auto'"
        )
    trained = {name: p for name, p in model.named_parameters() if not p.stop_gradient}
    if not trained:
        return {}
    if mode == "auto":
        return _captured(model, loss_fn, inputs, trained)
    with hooks_paused():
        return (_one_by_one if mode == "microbatch" else _vmapped)(model, loss_fn, inputs, trained)


def _captured(model: nn.Layer, loss_fn: Callable, inputs: tuple, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    groups: list[Group] = []
    capture = Capture(locate(trained.values(), model), groups.append, for_training=False)
    try:
        with hooks_only_of(capture), gradients_kept(trained.values()):
            losses = loss_fn(model, *inputs)
            _check_losses(losses)
            losses.sum().backward()
            capture.finish()
    finally:
        capture.remove()
    factors = {key: merge(uses) for group in groups for key, uses in group.factors.items()}
    batch = losses.shape[0]
    return {
        name: factors[id(p)].per_sample()
        if id(p) in factors
        else paddle.zeros([batch, *p.shape], dtype=accumulation_dtype(p))
        for name, p in trained.items()
    }


def _one_by_one(model: nn.Layer, loss_fn: Callable, inputs: tuple, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    rows = batch_size(inputs)
    parameters = list(trained.values())
    collected: list[list[Tensor]] = [[] for _ in parameters]
    for i in range(rows):
        losses = loss_fn(model, *row_of(inputs, i, rows))
        _check_losses(losses, rows=1)
        for store, gradient, parameter in zip(collected, _gradients(losses, parameters), parameters):
            store.append(gradient.astype(accumulation_dtype(parameter)))
    return {name: paddle.stack(gradients) for name, gradients in zip(trained, collected)}


def _vmapped(model: nn.Layer, loss_fn: Callable, inputs: tuple, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    rows = batch_size(inputs)
    parameters = list(trained.values())
    flat = list(tensors(inputs))
    batched = [k for k, x in enumerate(flat) if x.ndim and x.shape[0] == rows]

    def one(*row: Tensor) -> tuple[Tensor, ...]:
        mine = dict(zip(batched, row))
        position = iter(range(len(flat)))

        def pick(x: Tensor) -> Tensor:
            k = next(position)
            return mine[k].unsqueeze(0) if k in mine else x

        return tuple(_gradients(loss_fn(model, *map_tensors(pick, inputs)), parameters))

    made = paddle.vmap(one)(*[flat[k] for k in batched])  # type: ignore[attr-defined]
    return {name: g.astype(accumulation_dtype(p)) for (name, p), g in zip(trained.items(), made)}


def _gradients(losses: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    made = paddle.grad([losses.sum()], parameters, allow_unused=True)
    return [paddle.zeros_like(p) if g is None else g for g, p in zip(made, parameters)]


def batch_size(inputs: tuple) -> int:
    """The first axis of the first input tensor that has one longer than 1 (or 1 where none has)."""
    firsts = [x.shape[0] for x in tensors(inputs) if x.ndim]
    if not firsts:
        raise ValueError("inputs must hold a tensor with the batch on its first axis, found none")
    return next((n for n in firsts if n != 1), 1)


def row_of(inputs: tuple, i: int, rows: int) -> tuple:
    return map_tensors(lambda x: x[i : i + 1] if x.ndim and x.shape[0] == rows else x, inputs)


def _check_losses(losses: Any, rows: int | None = None) -> None:
    if not isinstance(losses, Tensor) or losses.ndim != 1 or (rows is not None and losses.shape[0] != rows):
        found = f"a tensor of shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"loss_fn must return one loss for each sample, shape {'[B]' if rows is None else [rows]}, found {found}; "
            "pass reduction='none' and average over everything but the batch"
        )


@contextmanager
def gradients_kept(parameters: Any) -> Iterator[None]:
    """The parameters' ``.grad`` set aside, and put back afterwards."""
    # Cloned: clearing a gradient frees its memory.
    held = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]
    for p, _ in held:
        p.clear_gradient(False)
    try:
        yield
    finally:
        for p, gradient in held:
            p.clear_gradient(False)
            if gradient is not None:
                p.grad = gradient
