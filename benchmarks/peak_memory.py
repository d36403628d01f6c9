"""What is alive where a step's memory is highest; run it as ``profile_step.py ROW --memory``.

The peak of Paddle's allocator is read and reset at every layer's hook and before and after each part of a private step,
which tells between which two of these moments it lies. The step then runs again (the same shapes, so the same peak) and
at the earlier moment everything that the package refers to is counted, each piece of memory once, in the order below.
What is left is held by Paddle's graph (inputs that operators saved for their backward), on its way as a gradient, or in
local variables of what runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import paddle
from measure import MIB, allocated_now, allocated_peak, optimizer_for, reset_allocated_peak
from paddle import Tensor
from workloads import Row

WHY = {
    "parameters": "the model",
    "gradients (plain)": "Paddle's weight gradients, until the update",
    "sums of clipped gradients": "one a trained parameter, as the plain step's gradients",
    "gradients of each sample": "where smaller than inputs and output gradients; until the factor is known",
    "output gradients": "until the clipping factor, which under flat clipping needs the last layer's gradient",
    "inputs of tapped layers": "the other half of each weight gradient; until the same moment",
    "held elsewhere": "saved in Paddle's graph for the backward pass, gradients on their way, local variables",
    "inside the moment": "what the operations between the two moments allocate and free again",
}


class Moments:
    """The peaks between the moments of one step, and what is alive at one of them."""

    def __init__(self, look_at: int, look: Callable[[], dict[str, float]]):
        self.names: list[str] = []
        self.peaks: list[float] = []
        self.current: list[float] = []
        self.look_at, self.look = look_at, look
        self.alive: dict[str, float] = {}

    def __call__(self, name: str) -> None:
        if self.names:
            self.peaks.append(allocated_peak())
        self.names.append(name)
        self.current.append(allocated_now())
        if len(self.names) - 1 == self.look_at:
            self.alive = self.look()
        reset_allocated_peak()


def account(row: Row, private: bool) -> dict:
    """To be run in a process of its own: {"peak": MiB, "between": [moment, moment], "alive": {category: MiB}}."""
    paddle.seed(0)
    model, loss = row.make()
    model.train()
    watch: list[Moments] = []
    mark = _install(model, private, watch)
    optimizer = optimizer_for(row, [p for p in model.parameters() if not p.stop_gradient], private)

    def step() -> None:
        mark("the forward pass begins")
        value = loss(model)
        mark("the backward pass begins")
        value.backward()
        mark("the backward pass is over")
        optimizer.step()
        mark("the update is done")
        optimizer.clear_grad()

    for _ in range(2):
        step()
    watch.append(Moments(-1, dict))
    step()
    first = watch.pop()
    at = max(range(len(first.peaks)), key=first.peaks.__getitem__)
    watch.append(Moments(at, lambda: _alive(model, optimizer, private)))
    step()
    second = watch.pop()
    alive = {key: value for key, value in second.alive.items() if value > 0}
    alive["held elsewhere"] = second.current[at] - sum(alive.values())
    alive["inside the moment"] = second.peaks[at] - second.current[at]
    return {"peak": second.peaks[at], "between": second.names[at : at + 2], "alive": alive}


def _install(model: paddle.nn.Layer, private: bool, watch: list[Moments]) -> Callable[[str], None]:
    def mark(name: str) -> None:
        if watch:
            watch[-1](name)

    def around(owner: Any, method: str, name: Callable[..., str]) -> None:
        inner = getattr(owner, method)

        def marked(*args: Any, **kwargs: Any) -> Any:
            what = name(*args)
            mark(f"before {what}")
            result = inner(*args, **kwargs)
            mark(f"after {what}")
            return result

        setattr(owner, method, marked)

    if private:
        from paddle_privacy import clipped_sum, optimizer
        from paddle_privacy.gradients import tap

        around(tap.Tap, "arrive", lambda self, *_: f"the capture of '{self.path}'")
        around(clipped_sum.ClippedSum, "_squared_norms", lambda *_: "the norms")
        around(clipped_sum.ClippedSum, "_add", lambda *_: "the sums")
        around(optimizer.PrivateOptimizer, "_update", lambda *_: "noise and update")
        return mark
    # The plain step has no hooks of its own; these do nothing but look.
    for path, layer in model.named_sublayers():
        if layer._parameters:
            layer.register_forward_post_hook(lambda _layer, _inputs, y, path=path: _look_at_gradient(mark, path, y))
    return mark


def _look_at_gradient(mark: Callable[[str], None], path: str, output: Any) -> None:
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not first.stop_gradient:
        first.register_hook(lambda _gradient: mark(f"the gradient of '{path}' is there"))


def _alive(model: paddle.nn.Layer, optimizer: Any, private: bool) -> dict[str, float]:
    """MiB by category, each piece of memory counted once."""
    counted: set[int] = set()

    def mib(tensors: Iterable[Tensor]) -> float:
        total = 0.0
        for tensor in tensors:
            pointer = tensor.data_ptr() if tensor._is_initialized() else 0
            if pointer and pointer not in counted:
                counted.add(pointer)
                total += tensor.size * tensor.element_size() / MIB
        return total

    parameters = list(model.parameters())
    found = {"parameters": mib(parameters)}
    if not private:
        found["gradients (plain)"] = mib(p.grad for p in parameters if p.grad is not None)
        return found
    from paddle_privacy.gradients.factors import Dense, Factor, Outer, Rows
    from paddle_privacy.gradients.tap import Call

    objects = gc.get_objects()
    factors = [x for x in objects if isinstance(x, Factor)]
    calls = [x for x in objects if isinstance(x, Call)]
    found["sums of clipped gradients"] = mib(optimizer._clipped_sum._sums.values())
    found["gradients of each sample"] = mib(f.gradients for f in factors if isinstance(f, Dense))
    found["output gradients"] = mib(f.g for f in factors if isinstance(f, (Outer, Rows)))
    inputs = [f.a for f in factors if isinstance(f, Outer)] + [f.ids for f in factors if isinstance(f, Rows)]
    inputs += [x for call in calls for x in call.inputs if isinstance(x, Tensor)]
    found["inputs of tapped layers"] = mib(inputs)
    return found


def print_account(name: str, plain: dict, private: dict) -> None:
    print(f"{name}: MiB at the peak")
    for kind, found in (("plain", plain), ("private", private)):
        print(f"  {kind}: {found['peak']:.1f}, between '{found['between'][0]}' and '{found['between'][1]}'")
        for key, mib in found["alive"].items():
            print(f"    {mib:9.1f}  {key}: {WHY[key]}")
