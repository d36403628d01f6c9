"""What a layer reads in place of a parameter that it uses barely, as in ``x @ self.w`` or ``x + self.pos_embed``.

A stand-in has the parameter's values and is a leaf of its own, so the parameter itself gets no gradient. Two kinds:

- a *product* stand-in notices ``x @ w`` (also through ``w.T``, ``transpose_y=True``, ``F.linear``): the product is
  computed with w frozen, and its input and output gradient make an outer-product factor. This is how a language-model
  head that multiplies by the embedding's weight costs no more than a Linear;
- an *expanded* stand-in holds one copy of the parameter for each sample, [B, 1, …, 1, *shape]. Its ordinary gradient
  *is* the per-sample gradient.

Which kind fits a layer is found by trial: see :mod:`paddle_privacy.gradients.bare`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import paddle
from paddle import Tensor

from paddle_privacy.gradients.factors import Factor, Outer
from paddle_privacy.gradients.rules.linear import positions

ProductHook = Callable[[Tensor, Tensor, bool], None]


class StandIn(paddle.base.core.eager.Tensor):
    """A leaf with a parameter's memory that notices products.

    Attributes:
        plain: the same values, frozen.
        on_product: called with (x, x @ w, transposed) for every product noticed; ``None``: nothing is noticed.
        transposed: whether this is the transpose of the parameter.
        derived: those made from it by transposition. A member of the :meth:`family` that the graph reaches was used in
            another way than a product.
    """

    plain: Tensor
    on_product: ProductHook | None
    transposed: bool
    derived: list[StandIn]
    origin: weakref.ref[StandIn] | None
    source: Tensor
    on_stray: Callable[[Tensor], None] | None

    def family(self) -> list[StandIn]:
        return [self, *self.derived]

    def __getattr__(self, name: str) -> Any:
        # What a parameter knows of itself beyond a tensor (is_distributed, optimize_attr).
        source = self.__dict__.get("source")
        if source is None or name.startswith("__"):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        return getattr(source, name)

    def __rmatmul__(self, x: Any) -> Tensor:
        return paddle._C_ops.matmul(x, self)

    @property
    def T(self) -> Tensor:
        return self.flipped() if self.ndim == 2 and self.on_product is not None else super().T

    def t(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.flipped() if self.ndim == 2 and self.on_product is not None else super().t(*args, **kwargs)

    def transpose(self, *args: Any, **kwargs: Any) -> Tensor:
        order = kwargs.get("perm") if not args else args[0] if len(args) == 1 else args
        if self.on_product is not None and isinstance(order, (list, tuple)) and list(order) == [1, 0]:
            return self.flipped()
        return super().transpose(*args, **kwargs)

    def flipped(self) -> StandIn:
        made = stand_in(self.plain.transpose([1, 0]), self.on_product, self.source, self.on_stray)
        made.transposed = not self.transposed
        origin = self if self.origin is None else self.origin()
        if origin is not None:
            made.origin = weakref.ref(origin)
            origin.derived.append(made)
        return made


def stand_in(
    values: Tensor,
    on_product: ProductHook | None = None,
    source: Tensor | None = None,
    on_stray: Callable[[Tensor], None] | None = None,
) -> StandIn:
    """A stand-in for a parameter with these values.

    Args:
        values: the parameter, or what stands for it.
        on_product: called for each product with it; only a matrix has any.
        source: the parameter whose attributes it shows; `values` by default.
        on_stray: called with a gradient that reached it by another way than a product.
    """
    frozen = values.detach()
    made = StandIn(values.detach())
    made.stop_gradient = False
    made.plain, made.transposed, made.derived, made.origin = frozen, False, [], None
    made.on_product = on_product if frozen.ndim == 2 else None
    made.source = values if source is None else source
    made.on_stray = on_stray
    if on_stray is not None:
        made.register_hook(on_stray)
    _notice_products()
    return made


def expanded(parameter: Tensor, rows: int, axes: int) -> StandIn:
    """[rows, 1 × axes, *shape], or [rows, *shape[1:]] for a parameter whose own first axis is a 1 that broadcasts."""
    with paddle.no_grad():
        lead = [rows] if broadcasts(parameter) else [rows, *[1] * axes]
        rest = list(parameter.shape[1:] if broadcasts(parameter) else parameter.shape)
        copies = parameter.detach().reshape([1] * len(lead) + rest).expand([*lead, *rest]).clone()
        return stand_in(copies, source=parameter)


def broadcasts(parameter: Tensor) -> bool:
    """Whether the parameter's own first axis is a 1 in the batch's place, as in a [1, T, d] position embedding."""
    return parameter.ndim > 1 and parameter.shape[0] == 1


def product_factor(x: Tensor, output_grad: Tensor, transposed: bool) -> Factor:
    """G = Σ x gᵀ for y = x w, or Σ g xᵀ for y = x wᵀ."""
    a, g = positions(x), positions(output_grad)
    return Outer(g, a) if transposed else Outer(a, g)


# Paddle's functionals look their operators up in this module when they run, which is where a product can be noticed.
# What stands here passes everything else through, in every thread.
_matmul: Callable = paddle._C_ops.matmul


def _notice_products() -> None:
    if paddle._C_ops.matmul is noticing_matmul:
        return
    paddle._C_ops.matmul = noticing_matmul
    for name in ("linear", "linear_v2"):
        if hasattr(paddle._C_ops, name):
            setattr(paddle._C_ops, name, _noticing_linear(getattr(paddle._C_ops, name)))


def noticing_matmul(*args: Any, **kwargs: Any) -> Tensor:
    named = dict(zip(("x", "y", "transpose_x", "transpose_y"), args), **kwargs)
    x, w = named.get("x"), named.get("y")
    if not (isinstance(w, StandIn) and w.on_product is not None and paddle.is_grad_enabled()):
        return _matmul(*args, **kwargs)
    known = set(named) <= {"x", "y", "transpose_x", "transpose_y"} and not named.get("transpose_x")
    if not known or not isinstance(x, Tensor) or x.ndim < 2:
        return _matmul(*args, **kwargs)
    transposed = bool(named.get("transpose_y"))
    y = _matmul(x, w.plain, False, transposed)
    if y.stop_gradient:
        # Nothing upstream is trained. The copy makes the output a non-leaf, so that in-place operations work.
        y.stop_gradient = False
        y = paddle.assign(y)
    w.on_product(x, y, w.transposed != transposed)
    return y


def _noticing_linear(original: Callable) -> Callable:
    def noticing_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any) -> Tensor:
        if isinstance(weight, StandIn) or isinstance(bias, StandIn):
            product = noticing_matmul(x, weight)
            return product if bias is None else product + bias
        return original(x, weight, bias, *rest)

    return noticing_linear
