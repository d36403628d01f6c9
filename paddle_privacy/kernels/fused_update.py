"""Noise, division and the optimizer's own update in one pass over memory.

A private step over Paddle's operators reads and writes every parameter-sized tensor some ten times; this reads and
writes each once. It applies to the optimizers whose rule is reproduced to rounding (SGD, Momentum, Adam, AdamW, and
subclasses that inherit their update unchanged) and declines everything else, so that Paddle's own update serves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import paddle
from paddle.optimizer import SGD, Adam, AdamW, Momentum
from paddle.regularizer import L2Decay

from . import native
from .noise_step import Rule, Update, update_with_noise

if TYPE_CHECKING:
    from ..noise import NoiseGenerator

_RULES = ((SGD, Rule.SGD), (Momentum, Rule.MOMENTUM), (AdamW, Rule.ADAM), (Adam, Rule.ADAM))


def fused_update(
    optimizer: paddle.optimizer.Optimizer,
    parameters: Sequence[paddle.Tensor],
    sums: Sequence[paddle.Tensor],
    generator: NoiseGenerator,
    std: float | Sequence[float],
    divisor: float,
) -> bool:
    """Update ``parameters`` by ``(sum + noise) / divisor`` as ``optimizer`` would, or touch nothing and return False.

    Args:
        optimizer: its accumulators, master weights and learning rate are used and advanced as by its own ``step``.
        parameters: trainable parameters; sums: their sums of clipped gradients, float32, which are left unchanged.
        generator, std: as in :meth:`..noise.NoiseGenerator.add_noise`.
        divisor: the expected batch size, > 0.

    Returns:
        False when there is no native code for these tensors or the optimizer's rule is not one that is reproduced:
        the caller then adds the noise and lets Paddle update.
    """
    if not divisor > 0:
        raise ValueError(f"divisor must be > 0, not {divisor!r}.")
    rule = _rule(optimizer)
    if rule is None or not parameters or not _plain(optimizer, parameters, sums):
        return False
    _create_accumulators(optimizer, parameters)
    updates = [_update(optimizer, rule, parameter, divisor) for parameter in parameters]
    state = [tensor for update in updates for tensor in (update.parameter, *update.moments)]
    narrow = {update.narrow is None for update in updates}
    if len(narrow) != 1 or not all(t.is_contiguous() and t.dtype == paddle.float32 for t in state):
        return False
    update_with_noise(rule, sums, generator.reserve(sums, std), updates)
    if rule is Rule.ADAM:
        _advance_powers(optimizer, parameters)
    return True


def _rule(optimizer: Any) -> Rule | None:
    # A subclass that overrides the update is another optimizer, whatever it is called.
    for kind, rule in _RULES:
        if getattr(type(optimizer), "_append_optimize_op", None) is kind._append_optimize_op:
            return Rule.NESTEROV if rule is Rule.MOMENTUM and optimizer._use_nesterov else rule
    return None


def _plain(optimizer: Any, parameters: Sequence[paddle.Tensor], sums: Sequence[paddle.Tensor]) -> bool:
    """Whether nothing stands between gradient and update that only Paddle's own step does."""
    features = (
        optimizer._grad_clip is not None,
        getattr(optimizer, "_use_multi_tensor", False),
        getattr(optimizer, "_amsgrad", False),
        getattr(optimizer, "_lr_ratio", None) is not None,
        getattr(optimizer, "_rescale_grad", 1.0) != 1.0,
        getattr(optimizer, "enable_tensor_fusion", False),
        isinstance(optimizer._param_groups[0], dict),
        not isinstance(getattr(optimizer, "_beta1", 0.0), float),
        not isinstance(getattr(optimizer, "_beta2", 0.0), float),
        optimizer._get_auxiliary_var("found_inf") is not None,
    )
    if any(bool(feature) for feature in features) or not native.serves(*parameters, *sums):
        return False
    return all(
        total.dtype == paddle.float32
        and total.is_contiguous()
        and total.shape == parameter.shape
        and parameter.is_contiguous()
        and (parameter.dtype == paddle.float32 or _has_master(optimizer, parameter))
        and _l2(optimizer, parameter) is not None
        for parameter, total in zip(parameters, sums)
    )


def _has_master(optimizer: Any, parameter: paddle.Tensor) -> bool:
    return bool(optimizer._multi_precision) and parameter.dtype in (paddle.float16, paddle.bfloat16)


def _l2(optimizer: Any, parameter: paddle.Tensor) -> float | None:
    """The coefficient that is added to the gradient; None where the regularizer is not an L2 decay."""
    own = getattr(parameter, "regularizer", None)
    if own is not None:
        return float(own._coeff) if isinstance(own, L2Decay) else None
    if getattr(optimizer, "_regularization_method", "") == "l2_decay":
        return float(optimizer._regularization_coeff)
    common = optimizer.regularization
    if common is None:
        return 0.0
    return float(common._coeff) if isinstance(common, L2Decay) else None


def _create_accumulators(optimizer: Any, parameters: Sequence[paddle.Tensor]) -> None:
    from paddle.base import framework
    from paddle.base.layer_helper import LayerHelper

    optimizer.helper = LayerHelper(type(optimizer).__name__)
    optimizer._create_accumulators(framework.default_main_program().global_block(), list(parameters))


def _update(optimizer: Any, rule: Rule, parameter: paddle.Tensor, divisor: float) -> Update:
    rate = float(optimizer.get_lr()) * float(parameter.optimize_attr.get("learning_rate", 1.0))
    narrow = parameter if _has_master(optimizer, parameter) else None
    target = optimizer._master_weights[parameter.name] if narrow is not None else parameter
    l2 = _l2(optimizer, parameter) or 0.0

    def state(name: str) -> paddle.Tensor:
        return optimizer._get_accumulator_master(name, parameter)

    if rule is Rule.SGD:
        return Update(target, divisor, rate, l2, narrow=narrow)
    if rule is not Rule.ADAM:
        moments: tuple[paddle.Tensor, ...] = (state(optimizer._velocity_acc_str),)
        return Update(target, divisor, rate, l2, beta1=optimizer._momentum, moments=moments, narrow=narrow)
    moments = state(optimizer._moment1_acc_str), state(optimizer._moment2_acc_str)
    decay = 1.0
    if isinstance(optimizer, AdamW):
        decays = optimizer._apply_decay_param_fun is None or optimizer._apply_decay_param_fun(parameter.name)
        decay = 1.0 - rate * float(optimizer._weight_decay) if decays else 1.0
    power1 = float(state(optimizer._beta1_pow_acc_str).numpy().item())
    root = math.sqrt(1.0 - float(state(optimizer._beta2_pow_acc_str).numpy().item()))
    # The bias correction of Kingma and Ba's Adam (2015), end of section 2, as Paddle's kernel applies it.
    return Update(
        target,
        divisor,
        rate * root / (1.0 - power1),
        l2,
        decay,
        optimizer._beta1,
        optimizer._beta2,
        float(optimizer._epsilon) * root,
        moments,
        narrow,
    )


def _advance_powers(optimizer: Any, parameters: Sequence[paddle.Tensor]) -> None:
    with paddle.no_grad():
        for parameter in parameters:
            for name, beta in (
                (optimizer._beta1_pow_acc_str, optimizer._beta1),
                (optimizer._beta2_pow_acc_str, optimizer._beta2),
            ):
                optimizer._get_accumulator_master(name, parameter).scale_(beta)
