"""Paddle's optimizers with a private step.

One step, from here to any formula: the taps of :mod:`paddle_privacy.gradients` hand over each ``backward()`` as a group
of factors; :class:`~paddle_privacy.clipped_sum.ClippedSum` clips and adds it; :meth:`PrivateOptimizer.step` asks
:class:`~paddle_privacy.spending.Spending` whether the budget allows the step, writes the ledger, adds noise of
σ · ``clipping.sensitivity``, divides by the public batch size, and lets Paddle's own update do the rest.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import paddle
from paddle import Tensor, nn
from paddle.optimizer import SGD, Adam, AdamW, Momentum, Optimizer

from paddle_privacy.arguments import check_arguments, distinct_parameters, noise_generator
from paddle_privacy.clipped_sum import ClippedSum
from paddle_privacy.clipping import Clipping, make_clipping, positive
from paddle_privacy.distributed.step import SharedStep, join_ranks, rank_noise, run_stage, same_group
from paddle_privacy.errors import PrivacyError, PrivacyWarning
from paddle_privacy.gradients.capture import Capture, Group
from paddle_privacy.gradients.guard import refuse_other_gradients
from paddle_privacy.gradients.locate import locate
from paddle_privacy.gradients.loss_scaling import ScalerWatch, watch_loss_scaling
from paddle_privacy.kernels.fused_update import fused_update
from paddle_privacy.ledger import Ledger, environment, parameter_fingerprint
from paddle_privacy.noise import NoiseGenerator
from paddle_privacy.resume import continue_account, ledger_receipt, steps_beyond
from paddle_privacy.schedules import Schedule
from paddle_privacy.spending import PrivacySpent, Spending

_STATE_KEY = "paddle_privacy"


class PrivateOptimizer(Optimizer):
    """Mixin in front of a Paddle optimizer: the same update on a clipped, noised gradient.

    Positional and other keyword arguments go to the Paddle optimizer (``parameters=`` may also be the model).

    Args:
        clip_norm: C, the bound on each sample's gradient L2 norm (a list of bounds for ``clipping="per_layer"``).
        noise_multiplier: σ; the noise on the *sum* of clipped gradients is N(0, σ²C²) in every coordinate. Like
            `clip_norm`, a number or a :class:`~paddle_privacy.schedules.Schedule`.
        batch_size: expected batch size; the public divisor of the noisy sum (never the realised size).
        epochs: planned epochs, for calibration and reports.
        dataset_size: N, the number of training rows.
        data_loader: the ``paddle.io.DataLoader`` in use; tells N, the batch size and how it samples.
        sampling: ``"auto"`` (what the loader is seen to do), ``"poisson"``, ``"shuffle"`` (each row once an epoch, no
            amplification) or ``"none"`` (every row in every step).
        target_epsilon, target_delta: calibrate σ so that ε ≤ target_epsilon after `epochs`; instead of
            `noise_multiplier`. Training on past the plan raises :class:`PrivacyBudgetExceeded`.
        max_epsilon: hard budget at `target_delta`.
        clipping: ``"flat"``, ``"per_layer"``, ``"automatic"``, ``"psac"``, ``"adaptive"``, or a
            :class:`~paddle_privacy.clipping.Clipping`.
        loss_reduction: ``"mean"`` or ``"sum"``: how the loss joins the rows of one ``backward()``. The update is
            divided by `batch_size` under ``"mean"``, and not at all under ``"sum"``, as in plain training.
        accountant: ``"rdp"``, ``"zcdp"``, ``"pld"`` or an instance.
        generator: a ``NoiseGenerator``; with ``NoiseGenerator.seeded(...)`` also pass ``secure=False``. Tests only.
        secure: noise keyed by the operating system (default). ``secure=False`` is needed to pass a seeded generator.
        ledger: path of the privacy ledger, or a :class:`~paddle_privacy.ledger.Ledger`.
        sharding_stage: under ``paddle.distributed``, 1 or 2 keeps moments, master weights and summed gradient of each
            parameter on one rank only; 0 keeps them on all. By default what ``fleet.init`` was told.

    Each ``backward()`` is one group of samples; several before a ``step()`` add up (do not divide the loss by their
    number: the divisor is `batch_size`). The guarantee is for adding or removing one row (zeroing it out where the
    batches are shuffled); see :meth:`privacy_statement`.

    Raises:
        ValueError, TypeError: an argument is refused; nothing has then been changed.
        PrivacyError: a parameter or layer whose per-sample gradients cannot be bounded, named by its path.
    """

    def __init__(
        self,
        *args: Any,
        clip_norm: Any = None,
        batch_size: float,
        noise_multiplier: float | Schedule | None = None,
        epochs: float | None = None,
        dataset_size: int | None = None,
        data_loader: Any = None,
        sampling: str = "auto",
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        max_epsilon: float | None = None,
        clipping: str | Clipping = "flat",
        loss_reduction: str = "mean",
        accountant: Any = "rdp",
        generator: NoiseGenerator | None = None,
        secure: bool = True,
        ledger: str | os.PathLike | Ledger | None = None,
        sharding_stage: int | None = None,
        **kwargs: Any,
    ):
        stage = run_stage(sharding_stage)
        check_arguments(
            noise_multiplier=noise_multiplier,
            epochs=epochs,
            dataset_size=dataset_size,
            sampling=sampling,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            max_epsilon=max_epsilon,
            loss_reduction=loss_reduction,
        )
        batch_size = positive("batch_size", batch_size)
        if not math.isfinite(batch_size):
            raise ValueError(f"batch_size must be finite, found {batch_size!r}")
        made_clipping = make_clipping(clipping, clip_norm, batch_size)
        if noise_multiplier and not math.isfinite(made_clipping.sensitivity):
            raise ValueError("clip_norm must be finite where there is noise: an unbounded gradient cannot be hidden")
        noise = rank_noise(noise_generator(generator, secure))
        bound = inspect.signature(super().__init__).bind_partial(*args, **kwargs)
        if bound.arguments.get("grad_clip") is not None:
            raise ValueError(
                "grad_clip clips the batch's gradient after the noise and is not what makes training private; leave it "
                "out (each sample is clipped to clip_norm)"
            )
        parameters, model = bound.arguments.get("parameters"), None
        if isinstance(parameters, nn.Layer):
            model = parameters
            bound.arguments["parameters"] = model.parameters()
        managed = distinct_parameters(bound.arguments.get("parameters"))
        spending = Spending(
            clipping=made_clipping,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            accountant=accountant,
            epochs=epochs,
            dataset_size=dataset_size,
            data_loader=data_loader,
            sampling=sampling,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            max_epsilon=max_epsilon,
        )
        located = locate(managed, model)
        paths = {id(p): owner.path for owner in reversed(located.owners) for p in owner.parameters.values()}
        clipped_sum = ClippedSum(managed, [paths[id(p)] for p in managed], made_clipping)

        super().__init__(*bound.args, **bound.kwargs)
        self.clipping, self.spending, self.noise = made_clipping, spending, noise
        self.batch_size, self.loss_reduction = batch_size, loss_reduction
        self.last_norms: Tensor | None = None
        self._clipped_sum = clipped_sum
        watch_loss_scaling()
        self._scaler_watch = ScalerWatch()
        self._backwards = 0
        self._logical_batch_complete = True
        self._logical_batch: tuple[int, int] | None = None
        self._ledger = ledger if isinstance(ledger, Ledger) or ledger is None else Ledger(ledger)
        early = self._absorb_layer if made_clipping.by_layer else None
        self._capture = Capture(located, self._absorb, self._reconcile, early)
        self._capture.withdraw_published()
        self._updating = False
        self._shared: SharedStep | None = None
        continue_account(self)
        self._shared = join_ranks(self, stage)

    # What the run is

    @property
    def noise_multiplier(self) -> float | None:
        """σ; ``None`` while it waits for the data set's size to be calibrated."""
        return self.spending.noise_multiplier

    @property
    def clip_norm(self) -> Any:
        """C, as it is now (adaptive clipping moves it)."""
        return self.clipping.clip_norm

    @property
    def accountant(self) -> Any:
        return self.spending.accountant

    def get_privacy_spent(self, target_delta: float | None = None) -> PrivacySpent:
        """(ε, δ) of all steps taken so far; `target_delta` defaults to the constructor's."""
        return self.spending.spent(target_delta)

    def privacy_statement(self) -> dict[str, Any]:
        """What ε is about: unit, relation, sampling and mechanism, as a ledger header and a report state them."""
        spending = self.spending
        scheme = spending.scheme
        return {
            "unit": "one row of the training set",
            "relation": spending.accountant.relation
            or ("zero_out" if spending.kind == "shuffle" else "add_or_remove_one"),
            "dataset_size": spending.num_rows,
            "batch_size": self.batch_size,
            "sampling": spending.kind,
            "sampling_declared_by_user": spending.declared,
            "sampler": scheme.reason if scheme is not None else None,
            "sample_rate": spending.sample_rate if spending.kind == "poisson" else None,
            "noise_multiplier": spending.noise_multiplier,
            "noise_schedule": spending.noise_schedule,
            "clip_norm": self.clip_norm,
            "clip_schedule": self.clipping.schedule_in_words,
            "clipping": self.clipping.name,
            "loss_reduction": self.loss_reduction,
            "noise": self.noise.describe(),
            "epochs": spending.epochs,
            "delta": spending.target_delta,
            "accountant": spending.accountant.name,
            "world_size": self._shared.ranks.world if self._shared is not None else 1,
        }

    # Samples arrive

    def _reconcile(self, group: Group) -> None:
        """A backward() began: which batch of the sampler is it? Failures are raised by step()."""
        passes = self.spending.passes_due
        emission = group.emission = self.spending.observe(group.batch or 0)
        if self.spending.passes_due > passes and self._backwards:
            self._drop("the loader began a new pass inside one update, in which a row could then be twice")
        if emission is not None:
            batch = (emission.generation, emission.step)
            if self._logical_batch is not None and batch != self._logical_batch and self._backwards:
                self._drop("a logical batch was left unfinished")
            self._logical_batch = batch
            self._logical_batch_complete = emission.last

    def _drop(self, why: str) -> None:
        warnings.warn(f"{why}; what had been added before was dropped", PrivacyWarning, stacklevel=2)
        self._forget_samples()

    def _absorb(self, group: Group) -> None:
        """A backward() is over: clip and add its samples. Failures are raised by step()."""
        self._backwards += 1
        self._scaler_watch.saw(group.scaling)
        if group.emission is None or not group.emission.placeholder:
            self._clipped_sum.add(group, self._scale_of(group))

    def _absorb_layer(self, group: Group, keys: list[int]) -> None:
        """All the gradients of a layer are there: clip and add them while the backward goes on."""
        if group.emission is None or not group.emission.placeholder:
            self._clipped_sum.add_layer(group, keys, self._scale_of(group))

    def _scale_of(self, group: Group) -> float:
        """What turns recorded gradients into those of one sample's loss."""
        factor = 1.0 if group.scaling is None else group.scaling.factor
        return ((group.batch or 0) if self.loss_reduction == "mean" else 1.0) / factor

    def _forget_samples(self) -> None:
        self._clipped_sum.clear()
        self._capture.used_inputs.clear()
        self._scaler_watch.forget()
        self._backwards = 0
        self._logical_batch, self._logical_batch_complete = None, True

    # The step

    @paddle.no_grad()
    def step(self) -> None:
        """One private update, or none yet where a logical batch is still incomplete.

        Raises:
            PrivacyError: the samples' gradients were not all captured; the weights have not been touched.
            PrivacyBudgetExceeded: ε would pass the budget; the weights have not been touched.
        """
        same_group(self._shared)
        try:
            ready = self._ready()
        except Exception as failure:
            if self._shared is not None:
                self._shared.report(failure)
            raise
        if not ready:
            return
        if self._shared is not None:
            self._agree(self._shared)
        event, count = self.spending.charge()
        self._record(event, count)
        if self._clipped_sum.non_finite:
            warnings.warn(
                f"{self._clipped_sum.non_finite} sample(s) had a gradient that is not finite and were left out",
                PrivacyWarning,
                stacklevel=2,
            )
        sums: list[Tensor | None] = [*self._clipped_sum.take()]
        self.last_norms = self._clipped_sum.norms
        sigma = self.spending.charged_noise_multiplier
        std = sigma * self._clipped_sum.sensitivity if sigma else 0.0
        self._forget_samples()
        if self._shared is not None:
            self._shared.update(sums, std, self.noise, lambda totals: self._update(totals, std, noised=True))
        else:
            self._update(sums, std)
        self.clipping.after_step(self.last_norms, self.batch_size, self._noised)
        self.clipping.advance(self.spending.steps)

    def _ready(self) -> bool:
        """Whether the samples of one update are in; raises what went wrong on the way."""
        try:
            self._capture.finish()
        except BaseException:
            self._forget_samples()
            raise
        if not self._logical_batch_complete:
            return False
        refuse_other_gradients(self._capture, distinct_parameters(self._parameter_list))
        if not self._backwards:
            raise PrivacyError(
                "step() without a backward() through the layers that own this optimizer's parameters; call "
                "loss.backward() first, and check that the model in use is the one whose parameters the optimizer holds"
            )
        self._scaler_watch.check()
        return True

    def _agree(self, shared: SharedStep) -> None:
        try:
            shared.agree(self)
        except BaseException:
            self._forget_samples()
            raise

    def _noised(self, value: float, std: float) -> float:
        """A statistic of the samples plus N(0, std²); over all ranks where there are several."""
        if self._shared is not None:
            return self._shared.noised_number(value, std, self.noise)
        return value + std * float(self.noise.standard_normal([1])[0])

    def _update(self, sums: Sequence[Tensor | None], std: float, noised: bool = False) -> None:
        """Noise of standard deviation `std` (`noised`: it is in already), division by the batch size, Paddle's update.

        Only of the parameters that have a sum: under sharding a rank updates its own.

        In one native pass where Paddle's rule is reproduced exactly; otherwise the noisy gradients become the
        parameters' ``.grad`` (readable until the next forward) for Paddle's own step.
        """
        managed = [
            (p, total)
            for p, total in zip(self._clipped_sum.parameters, sums)
            if total is not None and not p.stop_gradient
        ]
        if not managed:
            return
        parameters, totals = [p for p, _ in managed], [total for _, total in managed]
        std = 0.0 if noised else std
        divisor = self.batch_size if self.loss_reduction == "mean" else 1.0
        if fused_update(self, parameters, totals, self.noise, std, divisor):
            return
        self.noise.add_noise(totals, std)
        for parameter, noisy in zip(parameters, totals):
            parameter.grad = noisy.scale_(1.0 / divisor).astype(parameter.dtype)
        self._capture.published = True
        self._updating = True
        try:
            super().step()
        finally:
            self._updating = False

    def _apply_optimize(self, *args: Any, **kwargs: Any) -> Any:
        if not self._updating:
            raise PrivacyError(
                "something around this optimizer (a sharding wrapper, for one) called Paddle's update itself, on "
                "gradients that are neither clipped nor noised; call the private optimizer's own step()"
            )
        return super()._apply_optimize(*args, **kwargs)

    def _record(self, event: Any, count: int) -> None:
        """Makes the spend durable before the noisy update exists (write-ahead). The ledger's one writer is rank 0."""
        if self._ledger is None:
            return
        if self._shared is None:
            self._append(self._ledger, event, count)
            return
        try:
            if self._shared.ranks.leader:
                self._append(self._ledger, event, count)
        except Exception as failure:
            self._shared.confirm_record(failure)
            raise
        self._shared.confirm_record(None)

    def _append(self, ledger: Ledger, event: Any, count: int) -> None:
        from paddle_privacy.accounting.events import SelfComposed

        if not ledger.is_open:
            trained = [p for p in self._clipped_sum.parameters if not p.stop_gradient]
            fingerprint = parameter_fingerprint(trained)
            ledger.open({**environment(), **self.privacy_statement(), "model_fingerprint": fingerprint})
        delta = self.spending.target_delta
        epsilon = self.spending.spent(delta).epsilon if delta is not None else None
        charged = event if count == 1 else SelfComposed(event, count)
        ledger.append(charged.to_dict(), epsilon, self.spending.steps)

    def _set_auxiliary_var(self, key: str, val: Any) -> None:
        """GradScaler says whether a gradient overflowed, and asks afterwards: to a private optimizer none did."""
        # Paddle's own update sets it back with a plain bool.
        if key == "found_inf" and isinstance(val, Tensor):
            self._scaler_watch.called_by_scaler = True
            val = paddle.to_tensor([False])
        super()._set_auxiliary_var(key, val)

    # Paddle's other ways to a step

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Clears the published gradients. Samples not yet used by step() are dropped as well, as in plain Paddle.

        Inside an incomplete logical batch nothing is dropped: the loop of a split batch clears after every piece.
        """
        if self._logical_batch_complete:
            self._capture.discard()
            self._forget_samples()
        else:
            self._capture.close()
            self._capture.withdraw_published()

    def zero_grad(self, set_to_zero: bool = True) -> None:
        """The same as :meth:`clear_grad`."""
        self.clear_grad(set_to_zero)

    def minimize(self, loss: Tensor, *args: Any, **kwargs: Any) -> tuple[None, list]:
        """The private :meth:`step`, after ``loss.backward()``; other arguments are refused."""
        if args or any(value is not None for value in kwargs.values()):
            raise ValueError("minimize() of a private optimizer takes only the loss")
        self.step()
        return None, []

    def backward(self, *args: Any, **kwargs: Any) -> list:
        raise PrivacyError("this would collect gradients past the clipping; call loss.backward() and optimizer.step()")

    def apply_gradients(self, *args: Any, **kwargs: Any) -> list:
        raise PrivacyError("gradients from outside are neither clipped nor noised; call optimizer.step()")

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Paddle's state, and under ``"paddle_privacy"`` the accountant's, the noise multiplier and the clipping's.

        No noise key is part of it: a resumed run draws fresh noise. Where the states are sharded, all ranks must call
        this together, and each gets the whole.
        """
        state = super().state_dict() if self._shared is None else self._shared.take_part_in_saving(self, keep=True)
        state[_STATE_KEY] = {
            "spending": self.spending.state_dict(),
            "clipping": self.clipping.state_dict(),
            "ledger": ledger_receipt(self),
        }
        return state

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` saved; ε continues where the saved run stopped.

        Steps that the run's ledger holds beyond the saved state are added: their weights are lost, their spend is not.

        Raises:
            ValueError: the state lacks the accountant (it was saved by a plain optimizer), or does not fit this run.
            PrivacyError: the saved run kept a ledger that this optimizer does not continue.
        """
        state = dict(state_dict)
        private = state.pop(_STATE_KEY, None)
        if private is None:
            raise ValueError(
                "state_dict has no 'paddle_privacy' entry, so what earlier steps spent is unknown; load the state of a "
                "private optimizer"
            )
        lost = steps_beyond(private.get("ledger") or ("0" if self._ledger is not None else None), self)
        self.clipping.load_state_dict(private["clipping"])
        self.spending.load_state_dict(private["spending"])
        self.clipping.advance(self.spending.steps)
        for event, count in lost:
            self.spending.accountant.compose(event, count)
            self.spending.steps += count
        self._capture.discard()
        self._forget_samples()
        shards = None if self._shared is None else self._shared.shards
        super().set_state_dict(state if shards is None else shards.own_state(state))

    set_dict = set_state_dict

    def detach(self) -> None:
        """Takes all hooks off the model. The optimizer cannot step afterwards."""
        self._capture.remove()
        if self._shared is not None:
            self._shared.remove_hooks()


Wrapped = TypeVar("Wrapped", bound=Optimizer)


def dp_optimizer(optimizer_class: type[Wrapped]) -> type[Wrapped]:
    """A private version of any Paddle optimizer class, with the keywords of :class:`PrivateOptimizer`.

    Args:
        optimizer_class: a first-order ``paddle.optimizer.Optimizer``; its update sees nothing but the noisy gradient.

    Raises:
        TypeError: not an optimizer class, or one that evaluates the loss several times a step (LBFGS).
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"optimizer_class must be a paddle.optimizer.Optimizer class, found {optimizer_class!r}")
    if issubclass(optimizer_class, paddle.optimizer.LBFGS):
        raise TypeError(
            "LBFGS evaluates the loss several times a step, each of which would have to be noised and accounted for; "
            "use a first-order optimizer such as DPAdamW"
        )
    if issubclass(optimizer_class, PrivateOptimizer):
        return optimizer_class
    name = f"DP{optimizer_class.__name__}"
    doc = f"Private {optimizer_class.__name__}, with the keywords of PrivateOptimizer.\n\n{PrivateOptimizer.__doc__}"
    made = type(name, (PrivateOptimizer, optimizer_class), {"__doc__": doc, "__module__": __name__})
    made.__signature__ = _joined_signature(optimizer_class)  # type: ignore[attr-defined]
    return made


def _joined_signature(optimizer_class: type[Optimizer]) -> inspect.Signature:
    """Paddle's own parameters, then the private keywords: what help() and editors show."""
    own = [
        p for n, p in inspect.signature(optimizer_class.__init__).parameters.items() if n not in ("self", "grad_clip")
    ]
    private = [
        p
        for p in inspect.signature(PrivateOptimizer.__init__).parameters.values()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    return inspect.Signature([*own, *private])


class DPSGD(PrivateOptimizer, SGD):
    __doc__ = f"Private SGD (Abadi et al. 2016).\n\n{PrivateOptimizer.__doc__}"


class DPMomentum(PrivateOptimizer, Momentum):
    __doc__ = f"Private SGD with momentum; the momentum is post-processing.\n\n{PrivateOptimizer.__doc__}"


class DPAdam(PrivateOptimizer, Adam):
    __doc__ = f"Private Adam; its moments are post-processing of the noisy gradients.\n\n{PrivateOptimizer.__doc__}"


class DPAdamW(PrivateOptimizer, AdamW):
    __doc__ = f"Private AdamW; the decay never touches the private sum.\n\n{PrivateOptimizer.__doc__}"


for _cls, _base in ((DPSGD, SGD), (DPMomentum, Momentum), (DPAdam, Adam), (DPAdamW, AdamW)):
    _cls.__signature__ = _joined_signature(_base)
