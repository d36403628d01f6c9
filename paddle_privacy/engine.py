"""One call that turns a model, an optimizer and a loader private, for programs that are organised that way."""

from __future__ import annotations

import warnings
from typing import Any

import paddle.distributed as dist
from paddle import nn
from paddle.io import DataLoader, DistributedBatchSampler
from paddle.optimizer import Optimizer

from paddle_privacy.accounting import get_accountant
from paddle_privacy.checkpoint import PathLike, load_checkpoint, save_checkpoint
from paddle_privacy.errors import PrivacyError, PrivacyWarning
from paddle_privacy.noise import NoiseGenerator
from paddle_privacy.optimizer import PrivateOptimizer, dp_optimizer
from paddle_privacy.sampling import PoissonBatchSampler, PoissonDataLoader, SamplingScheme, detect_sampling
from paddle_privacy.validation import ModuleValidator, Problem


class PrivacyEngine:
    """Makes training private and keeps the account of everything it made private.

    Args:
        accountant: ``"rdp"``, ``"zcdp"`` or ``"pld"``.

    Steps of all optimizers that one engine made are composed: they see the same people.
    """

    def __init__(self, *, accountant: str = "rdp") -> None:
        if not isinstance(accountant, str):
            raise TypeError(f'accountant must be the name "rdp", "zcdp" or "pld", got {accountant!r}')
        get_accountant(accountant)
        self._accountant_name = accountant
        self._optimizers: list[PrivateOptimizer] = []

    def make_private(
        self,
        *,
        module: nn.Layer,
        optimizer: Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        poisson_sampling: bool = True,
        max_physical_batch_size: int | None = None,
        clipping: Any = "flat",
        loss_reduction: str = "mean",
        epochs: float | None = None,
        target_delta: float | None = None,
        max_epsilon: float | None = None,
        ledger: Any = None,
        generator: NoiseGenerator | None = None,
        secure: bool = True,
        sharding_stage: int | None = None,
    ) -> tuple[nn.Layer, Any, DataLoader]:
        """Private training with a given noise.

        Args:
            module: the model; comes back as the same object with the same ``state_dict`` keys.
            optimizer: any first-order Paddle optimizer that has not stepped yet, without ``grad_clip``. The same
                object becomes private: no handle stays that could update the weights without noise.
            data_loader: a map-style loader. Its batch size is the expected batch size B, its data set gives N, and the
                rate is B / N. It is not changed.
            noise_multiplier: σ; the noise on the sum of clipped gradients is N(0, σ²C²).
            max_grad_norm: C (a list of bounds for ``clipping="per_layer"``).
            poisson_sampling: return a loader over the same data set that draws Poisson batches, as many an epoch as
                the given one has. Under ``paddle.distributed`` each rank draws its share of them: B is that of all
                ranks (a ``DistributedBatchSampler``'s batch size times the number of ranks). False keeps the given
                loader, and accounts without amplification by sampling.
            max_physical_batch_size: split each logical batch into pieces of at most so many rows. The loop stays as it
                is; ``optimizer.step()`` updates on the last piece of a logical batch and is counted once.
            clipping, loss_reduction, epochs, target_delta, max_epsilon, ledger, generator, secure, sharding_stage: as
                in :class:`paddle_privacy.DPSGD`.

        Returns:
            ``(module, optimizer, data_loader)``.

        Raises:
            UnsupportedLayer: the model has layers that cannot be trained privately; all of them are listed.
            PrivacyError: the loader or the optimizer cannot be made private; the message says why.
            ValueError, TypeError: an argument is refused. In every case nothing has been changed.
        """
        privacy = {
            "noise_multiplier": noise_multiplier,
            "clip_norm": max_grad_norm,
            "clipping": clipping,
            "loss_reduction": loss_reduction,
            "epochs": epochs,
            "target_delta": target_delta,
            "max_epsilon": max_epsilon,
            "ledger": ledger,
            "generator": generator,
            "secure": secure,
            "sharding_stage": sharding_stage,
        }
        return self._make(module, optimizer, data_loader, poisson_sampling, max_physical_batch_size, privacy)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Layer,
        optimizer: Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float | list[float],
        poisson_sampling: bool = True,
        max_physical_batch_size: int | None = None,
        clipping: Any = "flat",
        loss_reduction: str = "mean",
        ledger: Any = None,
        generator: NoiseGenerator | None = None,
        secure: bool = True,
        sharding_stage: int | None = None,
    ) -> tuple[nn.Layer, Any, DataLoader]:
        """Private training with the least noise that keeps ε ≤ ``target_epsilon`` for ``epochs`` passes.

        A step beyond them raises :class:`~paddle_privacy.PrivacyBudgetExceeded` before it touches the weights. The
        other arguments, results and errors are those of :meth:`make_private`.
        """
        privacy = {
            "target_epsilon": target_epsilon,
            "target_delta": target_delta,
            "epochs": epochs,
            "clip_norm": max_grad_norm,
            "clipping": clipping,
            "loss_reduction": loss_reduction,
            "ledger": ledger,
            "generator": generator,
            "secure": secure,
            "sharding_stage": sharding_stage,
        }
        return self._make(module, optimizer, data_loader, poisson_sampling, max_physical_batch_size, privacy)

    def _make(
        self,
        module: nn.Layer,
        optimizer: Optimizer,
        data_loader: DataLoader,
        poisson_sampling: bool,
        max_physical_batch_size: int | None,
        privacy: dict[str, Any],
    ) -> tuple[nn.Layer, Any, DataLoader]:
        if not isinstance(data_loader, DataLoader):
            raise TypeError(f"data_loader must be a paddle.io.DataLoader, got {type(data_loader).__name__}")
        if isinstance(optimizer, PrivateOptimizer):
            raise PrivacyError("optimizer is private already; give make_private() a plain Paddle optimizer")
        ModuleValidator.validate(module, strict=True)
        _check_owned(module, optimizer)
        scheme = _share_of_rows(data_loader) if poisson_sampling else None
        scheme = scheme or detect_sampling(data_loader)
        if poisson_sampling:
            loader: DataLoader = poisson_loader(data_loader, scheme, max_physical_batch_size)
            batch_size = loader.batch_sampler.batch_size  # type: ignore[union-attr]
        else:
            if max_physical_batch_size is not None:
                raise ValueError(
                    "max_physical_batch_size splits Poisson batches; with poisson_sampling=False give the loader the "
                    "small batch size and call backward() several times before step()"
                )
            loader, batch_size = (
                data_loader,
                scheme.batch_size or getattr(data_loader.batch_sampler, "batch_size", None),
            )
            if batch_size is None:
                raise PrivacyError(
                    f"data_loader does not say its batch size ({scheme.reason}), which is the public divisor of the "
                    "noisy sum; use DPSGD(..., batch_size=) with this loader"
                )
        adopt_optimizer(
            optimizer,
            module,
            batch_size=batch_size,
            data_loader=loader,
            accountant=self._accountant_name,
            **privacy,
        )
        assert isinstance(optimizer, PrivateOptimizer)
        self._optimizers.append(optimizer)
        return module, optimizer, loader

    @property
    def accountant(self) -> Any:
        """A new accountant that holds every step of every optimizer of this engine."""
        total = get_accountant(self._accountant_name)
        for optimizer in self._optimizers:
            for event, count in optimizer.accountant.history:
                total.compose(event, count)
        return total

    def get_epsilon(self, delta: float) -> float:
        """ε at ``delta`` of all steps so far; 0 before the first."""
        return self.accountant.get_epsilon(delta)

    @staticmethod
    def validate(module: nn.Layer, *, strict: bool = False) -> list[Problem]:
        """All layers that stand in the way, with their paths; see :class:`~paddle_privacy.ModuleValidator`."""
        return ModuleValidator.validate(module, strict=strict)

    @staticmethod
    def is_compatible(module: nn.Layer) -> bool:
        """Whether :meth:`validate` finds nothing."""
        return ModuleValidator.is_valid(module)

    def save_checkpoint(
        self, *, path: PathLike, module: nn.Layer, optimizer: Any = None, extra: dict[str, Any] | None = None
    ) -> None:
        """Write model, optimizer and account to a directory; see :func:`paddle_privacy.checkpoint.save_checkpoint`.

        ``optimizer`` may be left out where the engine has made one only.
        """
        save_checkpoint(path, model=module, optimizer=self._the_optimizer(optimizer), extra=extra)

    def load_checkpoint(self, *, path: PathLike, module: nn.Layer, optimizer: Any = None) -> dict[str, Any]:
        """Restore what :meth:`save_checkpoint` wrote, after the same ``make_private``; returns ``extra``."""
        return load_checkpoint(path, model=module, optimizer=self._the_optimizer(optimizer))

    def _the_optimizer(self, optimizer: Any) -> Any:
        if optimizer is None and len(self._optimizers) == 1:
            return self._optimizers[0]
        if not any(optimizer is own for own in self._optimizers):
            raise ValueError(
                f"optimizer must be one that this engine made private (it has made {len(self._optimizers)})"
            )
        return optimizer


def poisson_loader(
    data_loader: DataLoader, scheme: SamplingScheme, max_physical_batch_size: int | None
) -> PoissonDataLoader:
    """The same rows as ``data_loader`` in Poisson batches of the same expected size, and as many of them a pass.

    Raises:
        PrivacyError: the loader samples in a way that Poisson batches would replace (weights, a subset, an own order).
        ValueError: it has fewer rows than a batch.
    """
    if scheme.kind == "poisson":
        old = scheme.sampler
        if max_physical_batch_size is None:
            return PoissonDataLoader(data_loader, old)
        sampler = PoissonBatchSampler(
            num_rows=old.num_rows,
            batch_size=old.batch_size,
            steps=old.steps,
            max_physical_batch_size=max_physical_batch_size,
        )
        return PoissonDataLoader(data_loader, sampler)
    rows = len(data_loader.dataset)
    if scheme.kind != "shuffle":
        raise PrivacyError(
            f"data_loader uses a {scheme.reason}, which Poisson sampling would replace without a word; pass a loader "
            "with shuffle=True, or poisson_sampling=False to keep it without amplification by sampling"
        )
    if scheme.num_rows != rows:
        raise PrivacyError(
            f"data_loader takes {scheme.num_rows} of the {rows} rows of its data set, Poisson sampling would take all; "
            "put paddle.io.Subset around the data set instead"
        )
    if scheme.ranks not in (1, dist.get_world_size() if dist.is_initialized() else 1):
        raise PrivacyError(
            f"data_loader shares its rows among {scheme.ranks} ranks, which are not those of paddle.distributed; call "
            "paddle.distributed.init_parallel_env() before building it"
        )
    assert scheme.batch_size is not None
    sampler = PoissonBatchSampler(
        num_rows=rows,
        batch_size=scheme.batch_size,
        steps=max(1, scheme.steps_per_epoch or 1),
        max_physical_batch_size=max_physical_batch_size,
    )
    return PoissonDataLoader(data_loader, sampler)


def _share_of_rows(data_loader: DataLoader) -> SamplingScheme | None:
    """How Paddle's DistributedBatchSampler deals out the rows; None for other samplers.

    A Poisson sampler replaces it, so the rows that it repeats to fill the last share do not matter.
    """
    sampler = data_loader.batch_sampler
    if type(sampler) is not DistributedBatchSampler:
        return None
    rows, size = len(data_loader.dataset), sampler.batch_size * sampler.nranks
    reason = f"DistributedBatchSampler over {sampler.nranks} rank(s)"
    return SamplingScheme("shuffle", rows, min(size, rows), -(-rows // size), sampler.drop_last, reason, sampler)


class _AlreadyConstructed(Optimizer):
    """Takes the place of the Paddle optimizer's constructor where that has run already."""

    def __init__(self, parameters: list) -> None:
        pass


def adopt_optimizer(optimizer: Optimizer, module: nn.Layer | None = None, **privacy: Any) -> PrivateOptimizer:
    """Turn an existing Paddle optimizer private, in place; returns it.

    The object's class becomes ``dp_optimizer(type(optimizer))`` and only the private part of the constructor runs.
    Building a new optimizer instead would lose what Paddle does not record of its constructors' arguments (the
    decay function of AdamW, the ratios of its learning rates), and would leave the old one around: one call of its
    ``step()`` would be an update without noise.

    Args:
        optimizer: has not stepped yet: moments of earlier gradients would join private updates without noise.
        module: where given, must own the parameters.
        privacy: keywords of :class:`~paddle_privacy.optimizer.PrivateOptimizer`.

    Raises:
        As the constructor of a private optimizer; the optimizer is then as it was.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a paddle.optimizer.Optimizer, got {type(optimizer).__name__}")
    plain, private = type(optimizer), dp_optimizer(type(optimizer))
    if module is not None:
        _check_owned(module, optimizer)
    if optimizer._grad_clip is not None:
        raise ValueError(
            "optimizer has grad_clip, which clips the batch's gradient after the noise and does not make training "
            "private; build it without (each sample is clipped to max_grad_norm)"
        )
    if optimizer._accumulators:
        raise PrivacyError(
            "optimizer has taken steps already, and what it accumulated of those gradients would enter private updates "
            "without noise; build a new one"
        )
    parameters = list(optimizer._param_groups or optimizer._parameter_list)
    before = dict(optimizer.__dict__)
    adopting = type(private.__name__, (PrivateOptimizer, _AlreadyConstructed, plain), {})
    optimizer.__class__ = adopting
    try:
        PrivateOptimizer.__init__(optimizer, parameters=parameters, **privacy)
        optimizer.__class__ = private
    except BaseException:
        optimizer.__class__ = plain
        optimizer.__dict__.clear()
        optimizer.__dict__.update(before)
        raise
    assert isinstance(optimizer, PrivateOptimizer)
    return optimizer


def _check_owned(module: nn.Layer, optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a paddle.optimizer.Optimizer, got {type(optimizer).__name__}")
    owned = {id(p) for p in module.parameters()}
    held: list[Any] = []
    for item in optimizer._param_groups or optimizer._parameter_list or []:
        held += item["params"] if isinstance(item, dict) else [item]
    foreign = [p.name for p in held if id(p) not in owned]
    if foreign:
        raise PrivacyError(
            f"optimizer holds parameters {foreign[:5]} that are not in module; was the model rebuilt, wrapped or moved "
            "after the optimizer was made? Build the optimizer from module.parameters()"
        )
    idle = [n for n, p in module.named_parameters() if not p.stop_gradient and all(p is not h for h in held)]
    if idle:
        warnings.warn(
            f"trainable parameters {idle[:5]} of module are not in the optimizer; freeze them (stop_gradient=True)",
            PrivacyWarning,
            stacklevel=4,
        )
