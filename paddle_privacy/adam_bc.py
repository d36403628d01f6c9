"""Adam whose second moment is freed of the variance that the privacy noise adds.

In private Adam the second moment is mostly noise: E[v̂] = E[g²] + (σC/B)². Where the noise dominates, every
coordinate is divided by the same number, and Adam behaves as momentum does. The variance of the noise is public, so it
can be subtracted (Tang, Shpilevskiy and Lécuyer, *DP-AdamBC*, AAAI 2024, arXiv:2312.14334, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import Tensor
from paddle.optimizer import Adam

from paddle_privacy.clipping import positive
from paddle_privacy.optimizer import PrivateOptimizer

_STATE_KEY = "dp_adam_bc"


class DPAdamBC(PrivateOptimizer, Adam):
    """Private Adam with a bias-corrected second moment; post-processing of the same noisy gradients as ``DPAdam``.

    The update is ``lr * m̂ / sqrt(max(v̂ - Φ̂, variance_floor))``, where Φ̂ is the same moving average of the noise's
    variance that v̂ is of the squared gradient, so that a bound C that moves (adaptive clipping) is followed.

    Args:
        variance_floor: the paper's γ', the least second moment that is divided by; takes the place of ``epsilon``.
        others: those of ``paddle.optimizer.Adam`` and of :class:`~paddle_privacy.optimizer.PrivateOptimizer`.

    Raises:
        ValueError: ``amsgrad`` or ``lazy_mode`` is asked for, or a beta is not a number.
    """

    def __init__(self, *args: Any, variance_floor: float = 1e-8, **kwargs: Any) -> None:
        self._variance_floor = positive("variance_floor", variance_floor)
        self._noise_variance = 0.0
        self._noise_moment, self._updates = 0.0, 0
        super().__init__(*args, **kwargs)
        if self._amsgrad or self._lazy_mode:
            raise ValueError("amsgrad and lazy_mode keep moments that the correction does not fit; leave them out")
        if not isinstance(self._beta1, float) or not isinstance(self._beta2, float):
            raise ValueError("beta1 and beta2 must be numbers, not tensors")

    def _update(self, sums: Sequence[Tensor | None], std: float, noised: bool = False) -> None:
        divisor = self.batch_size if self.loss_reduction == "mean" else 1.0
        self._updates += 1
        beta2 = float(self._beta2)
        self._noise_moment = beta2 * self._noise_moment + (1.0 - beta2) * (std / divisor) ** 2
        self._noise_variance = self._noise_moment / (1.0 - beta2**self._updates)
        super()._update(sums, std, noised)

    def _append_optimize_op(self, block: Any, param_and_grad: Any) -> None:
        if isinstance(param_and_grad, dict):
            param_and_grad = self._update_param_group(param_and_grad)
        parameter, gradient = param_and_grad
        moment1 = self._get_accumulator_master(self._moment1_acc_str, parameter)
        moment2 = self._get_accumulator_master(self._moment2_acc_str, parameter)
        power1 = self._get_accumulator_master(self._beta1_pow_acc_str, parameter)
        power2 = self._get_accumulator_master(self._beta2_pow_acc_str, parameter)
        master = self._master_weights.get(parameter.name) if self._multi_precision else None
        weight = parameter if master is None else master
        g = gradient.astype(moment1.dtype)
        moment1.set_value(self._beta1 * moment1 + (1.0 - self._beta1) * g)
        moment2.set_value(self._beta2 * moment2 + (1.0 - self._beta2) * g * g)
        # Paddle keeps β^t for the coming update in these, as its own kernel does.
        mean = moment1 / (1.0 - power1)
        variance = paddle.clip(moment2 / (1.0 - power2) - self._noise_variance, min=self._variance_floor)
        rate = self._create_param_lr(param_and_grad)
        weight.set_value((weight - (rate * mean / variance.sqrt()).astype(weight.dtype)).astype(weight.dtype))
        if master is not None:
            parameter.set_value(master.astype(parameter.dtype))
        power1.set_value(power1 * self._beta1)
        power2.set_value(power2 * self._beta2)

    def state_dict(self) -> dict[str, Any]:
        """The private Adam's state, and the moving average of the noise's variance."""
        return {**super().state_dict(), _STATE_KEY: [self._noise_moment, self._updates]}

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            ValueError: the state is not of a DPAdamBC.
        """
        state = dict(state_dict)
        own = state.pop(_STATE_KEY, None)
        if own is None:
            raise ValueError(f"state_dict has no {_STATE_KEY!r} entry; load the state of a DPAdamBC")
        super().set_state_dict(state)
        self._noise_moment, self._updates = float(own[0]), int(own[1])

    set_dict = set_state_dict
