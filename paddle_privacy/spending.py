"""What the run's sampling really is, what each step therefore costs, and whether the budget allows it.

The path of one step: the sampler says what it emitted (:meth:`Spending.observe`, once a ``backward()``), the clipping
says which mechanism the step is, both together make the event, and :meth:`Spending.charge` gives it to the accountant
before the weights are touched.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

from paddle_privacy.accounting import get_accountant, get_noise_multiplier
from paddle_privacy.accounting.events import Composed, Event, PoissonSampled, ShuffledEpoch
from paddle_privacy.clipping import Clipping
from paddle_privacy.distributed.ranks import current_ranks
from paddle_privacy.errors import PrivacyBudgetExceeded, PrivacyError, PrivacyWarning
from paddle_privacy.sampling import Emission, PassCounter, SamplingScheme, detect_sampling, find_live_loader
from paddle_privacy.schedules import Schedule

SAMPLINGS = ("auto", "poisson", "shuffle", "none")
_DELTA_OF_HINTS = 1e-5


class PrivacySpent(NamedTuple):
    """(ε, δ): adding or removing one row changes no outcome's probability by more than e^ε, up to δ."""

    epsilon: float
    delta: float


class Spending:
    """The accountant's side of a run.

    Args:
        clipping: describes one noisy step as a mechanism.
        batch_size: expected rows of a logical batch, and the public divisor.
        noise_multiplier: σ, a schedule of it, or ``None`` to calibrate it for `target_epsilon` over `epochs`.
        accountant, epochs, dataset_size, data_loader, sampling, target_epsilon, target_delta, max_epsilon: as in
            :class:`paddle_privacy.DPSGD`.

    Raises:
        ValueError, TypeError: an argument is refused.
    """

    def __init__(
        self,
        *,
        clipping: Clipping,
        batch_size: float,
        noise_multiplier: float | Schedule | None,
        accountant: Any,
        epochs: float | None,
        dataset_size: int | None,
        data_loader: Any,
        sampling: str,
        target_epsilon: float | None,
        target_delta: float | None,
        max_epsilon: float | None,
    ):
        self.clipping, self.batch_size, self.epochs = clipping, batch_size, epochs
        self._schedule = noise_multiplier if isinstance(noise_multiplier, Schedule) else None
        # σ of the coming step; of the step that was charged last.
        self.noise_multiplier: float | None = (
            noise_multiplier(0) if isinstance(noise_multiplier, Schedule) else noise_multiplier
        )
        self.charged_noise_multiplier = 0.0
        self.sampling = sampling
        self.target_epsilon, self.target_delta = target_epsilon, target_delta
        # A σ calibrated for a plan keeps the plan's ε: training on would pass it.
        self.max_epsilon = max_epsilon if max_epsilon is not None else target_epsilon
        self.accountant = get_accountant(accountant)
        self.num_rows = dataset_size
        self.scheme: SamplingScheme | None = None
        self.kind: str | None = None
        self.steps = 0
        ranks = current_ranks()
        self.world = 1 if ranks is None else ranks.world
        self._resolved = False
        self._warned_of_rows = False
        self._passes: PassCounter | None = None
        self.passes_due = 0
        if data_loader is not None:
            self._adopt(detect_sampling(data_loader))
        if data_loader is not None or dataset_size is not None or sampling == "none":
            self._decide()

    # What the sampling is

    def _is_ours(self, scheme: SamplingScheme) -> bool:
        """Whether a loader that was found, not given, can be over the training rows.

        One with another N is not. Where N is unknown, nor is a Poisson loader of another batch size: leaving it out
        means that every row is assumed in every step.
        """
        if self.num_rows is not None:
            return self.num_rows == scheme.num_rows
        return scheme.kind != "poisson" or self._expects_our_batch(scheme)

    def _expects_our_batch(self, scheme: SamplingScheme) -> bool:
        return math.isclose(float(scheme.batch_size or 0), self.batch_size, rel_tol=1e-9)

    def _adopt(self, scheme: SamplingScheme) -> None:
        if self.num_rows is not None and scheme.num_rows is not None and self.num_rows != scheme.num_rows:
            raise ValueError(
                f"dataset_size={self.num_rows} but the data loader has {scheme.num_rows} rows; give one of them, or "
                "make them agree"
            )
        if scheme.kind == "poisson" and not self._expects_our_batch(scheme):
            raise ValueError(
                f"batch_size={self.batch_size:g} but the Poisson sampler expects {scheme.batch_size:g} rows a batch; "
                "the divisor of the noisy sum must be the expected batch size"
            )
        if scheme.ranks != self.world and (scheme.kind != "unknown" or self.sampling == "auto"):
            raise PrivacyError(
                f"the data loader shares its rows among {scheme.ranks} rank(s) and the run has {self.world}, so a row "
                "could be used by several of them in one step; use a PoissonBatchSampler or a DistributedBatchSampler, "
                "built after paddle.distributed.init_parallel_env(). Where every rank's data set has rows of its own, "
                "leave data_loader out and pass dataset_size=N (all ranks together) and sampling='shuffle'"
            )
        self.scheme = scheme
        self.num_rows = scheme.num_rows if scheme.num_rows is not None else self.num_rows

    def _decide(self) -> None:
        """Fixes the kind of accounting, from what is known and never better than it."""
        found = self.scheme.kind if self.scheme is not None else None
        if self.num_rows is not None and self.batch_size > self.num_rows:
            raise ValueError(f"batch_size={self.batch_size:g} is larger than the data set's {self.num_rows} rows")
        if self.sampling in ("poisson", "shuffle") and self.num_rows is None:
            raise PrivacyError(
                f"sampling={self.sampling!r} needs the number of rows; pass dataset_size=N or data_loader=loader"
            )
        if self.sampling != "auto":
            self.kind = self.sampling
            if found not in (None, self.sampling):
                assert self.scheme is not None
                if self.sampling != "none":
                    _warn(
                        f"sampling={self.sampling!r} was declared, but the data loader samples {self.scheme.reason}; ε "
                        "is stated for the declared sampling and every report says so"
                    )
        elif found == "poisson":
            self.kind = "poisson"
        elif self.num_rows is not None:
            # A loader whose order is unknown still shows each row once a pass, or dataset_size would mean nothing.
            self.kind = "shuffle"
        else:
            self.kind = "none"
        if self.kind == "shuffle" and found == "shuffle" and self.scheme is not None and self._passes is None:
            self._passes = PassCounter(self.scheme)
        if self.noise_multiplier is None:
            self.noise_multiplier = self._calibrated()

    @property
    def declared(self) -> bool:
        """Whether the sampling is the user's word rather than what a loader was seen to do."""
        found = self.scheme.kind if self.scheme is not None else None
        return self.kind in ("poisson", "shuffle") and found != self.kind

    @property
    def sample_rate(self) -> float | None:
        """B/N, never 1/len(loader); ``None`` where N is not known."""
        if self.num_rows is None:
            return None
        sampler = self._poisson_sampler()
        return sampler.sample_rate if sampler is not None else min(1.0, self.batch_size / self.num_rows)

    @property
    def steps_per_epoch(self) -> int | None:
        if self.num_rows is None:
            return None
        if self.scheme is not None and self.scheme.kind == "poisson" and self.scheme.steps_per_epoch is not None:
            return self.scheme.steps_per_epoch
        return math.ceil(self.num_rows / self.batch_size)

    @property
    def planned_steps(self) -> int | None:
        if self.epochs is None or self.steps_per_epoch is None:
            return None
        return math.ceil(self.epochs * self.steps_per_epoch)

    def _poisson_sampler(self) -> Any:
        return self.scheme.sampler if self.scheme is not None and self.scheme.kind == "poisson" else None

    def resolve(self) -> None:
        """Called when the first samples arrive: looks for the loader in use, and says what it had to assume."""
        if self._resolved:
            return
        self._resolved = True
        if self.scheme is None and (self.world == 1 or self.sampling == "auto"):
            live = find_live_loader()
            scheme = detect_sampling(live) if live is not None else None
            if scheme is not None and self._is_ours(scheme):
                self._adopt(scheme)
                if self.kind is not None:
                    self._decide()
        if self.scheme is None and self.world > 1:
            _warn(
                f"no data loader is known, so it is assumed that no row is on two of the {self.world} ranks in one "
                "step; pass data_loader=loader, and the library checks it"
            )
        if self.kind is not None:
            return
        self._decide()
        found = f"the DataLoader that is being iterated ({self.scheme.reason})" if self.scheme is not None else ""
        if self.kind == "none" and not found:
            _warn(
                "the data set's size and sampling are unknown, so ε assumes that every row takes part in every step; "
                f"pass data_loader=loader or dataset_size=N.{self._hint(self.batch_size * 100)}"
            )
        elif self.kind == "none":
            _warn(
                f"{found} does not say which rows it takes, so ε assumes every row in every step; pass dataset_size=N"
            )
        elif self.kind == "shuffle":
            _warn(
                f"N={self.num_rows} was read from {found}; ε is for shuffled batches, without amplification by "
                f"sampling (pass data_loader=loader to say so yourself).{self._hint(self.num_rows)}"
            )

    def _hint(self, num_rows: float | None) -> str:
        if not num_rows or not self.noise_multiplier:
            return ""
        from paddle_privacy.accounting import compute_epsilon

        epochs = self.epochs or 1
        epsilon = compute_epsilon(
            noise_multiplier=self.noise_multiplier,
            sample_rate=min(1.0, self.batch_size / num_rows),
            steps=math.ceil(epochs * math.ceil(num_rows / self.batch_size)),
            delta=self.target_delta or _DELTA_OF_HINTS,
        )
        rows = f" of N={num_rows:.0f} rows" if self.num_rows is None else ""
        return (
            f" Poisson batches (PoissonBatchSampler){rows} would give ε={epsilon:.2f} at "
            f"δ={self.target_delta or _DELTA_OF_HINTS:g} after {epochs:g} epochs"
        )

    def _calibrated(self) -> float:
        """The smallest σ whose ε over the planned epochs does not exceed the target."""
        rate = self.sample_rate if self.kind == "poisson" else 1.0
        steps = self._planned_passes() if self.kind == "shuffle" else self.planned_steps
        if rate is None or steps is None:
            raise PrivacyError(
                "target_epsilon cannot be turned into a noise multiplier without the number of rows; pass "
                "data_loader=loader or dataset_size=N"
            )
        assert self.target_epsilon is not None and self.target_delta is not None
        sigma = get_noise_multiplier(
            target_epsilon=self.target_epsilon,
            target_delta=self.target_delta,
            sample_rate=rate,
            steps=steps,
            accountant=self.accountant.name,
        )
        return self._room_for_statistics(sigma)

    def _room_for_statistics(self, sigma: float) -> float:
        """σ for the gradients such that they and the clipping's own statistic together cost what `sigma` does."""
        probe = self.clipping.mechanism(sigma)
        if not isinstance(probe, Composed):
            return sigma
        others = sum(1.0 / e.noise_multiplier**2 for e in probe.events[1:])  # type: ignore[attr-defined]
        precision = 1.0 / sigma**2 - others
        if precision <= 0:
            raise ValueError("count_noise is too small for target_epsilon: the quantile alone would spend it")
        return 1.0 / math.sqrt(precision)

    # What a step costs

    def observe(self, rows: int) -> Emission | None:
        """One backward() over `rows` rows. Returns the Poisson sampler's record of that batch, if there is one.

        Raises:
            PrivacyError: the rows are not the ones the sampler emitted.
        """
        self.resolve()
        self._refuse_too_many(rows)
        if self._passes is not None:
            self.passes_due += self._passes.observe()
        sampler = self._poisson_sampler()
        return sampler.emissions.take(rows) if sampler is not None else None

    def _refuse_too_many(self, rows: int) -> None:
        """More rows than a batch has: one sample is several rows, each of them clipped on its own."""
        if self._poisson_sampler() is not None:
            return
        why = (
            "if the model runs each sample several times (augmented copies, positions flattened into the batch), a "
            "sample would reach several times its bound: run the copies in separate forwards and add their losses"
        )
        loaded = self.scheme.batch_size if self.scheme is not None and self.scheme.kind == "shuffle" else None
        if loaded is not None and rows > loaded:
            raise PrivacyError(f"a backward() had {rows} rows where the data loader's batches have {loaded:g}; {why}")
        # Declared Poisson batches spread: six standard deviations are passed once in 10^9 batches.
        spread = 6.0 * math.sqrt(self.batch_size) if self.kind == "poisson" else 0.0
        if loaded is None and rows > self.batch_size + spread and not self._warned_of_rows:
            self._warned_of_rows = True
            _warn(
                f"a backward() had {rows} rows where batch_size={self.batch_size:g}; {why}, or pass the true batch_size"
            )

    def _due(self) -> tuple[Event, int]:
        """The event of the coming step, and how often it is composed."""
        sigma = self.require_noise_multiplier()
        mechanism = self.clipping.mechanism(sigma)
        if self.kind == "poisson":
            sampler = self._poisson_sampler()
            if sampler is not None:
                return sampler.event(mechanism), 1
            assert self.sample_rate is not None
            return PoissonSampled(self.sample_rate, mechanism), 1
        if self.kind == "shuffle":
            count = self.passes_due if self._passes is not None else int(self.steps % self._steps_a_pass() == 0)
            if count and self._schedule is not None:
                # A row may take part in any step of the pass.
                steps = self._steps_a_pass() if self.scheme is None else self.scheme.steps_per_epoch
                assert steps is not None
                sigma = min(self._schedule(step) for step in range(self.steps, self.steps + steps))
                mechanism = self.clipping.mechanism(sigma)
            return ShuffledEpoch(mechanism), count
        return mechanism, 1

    def _steps_a_pass(self) -> int:
        """Steps in which no row can come twice. Rounded down: a loader may drop its last batch."""
        assert self.num_rows is not None
        return max(1, int(self.num_rows // self.batch_size))

    def _planned_passes(self) -> int | None:
        if self.epochs is None or self.planned_steps is None:
            return None
        if self._passes is not None:
            return math.ceil(self.epochs)
        return math.ceil(self.planned_steps / self._steps_a_pass())

    def require_noise_multiplier(self) -> float:
        if self.noise_multiplier is None:
            raise PrivacyError(
                "the noise multiplier is not known before the first backward() tells the data set's size"
            )
        return self.noise_multiplier

    def charge(self) -> tuple[Event, int]:
        """Composes the coming step; refuses it, unchanged, where it would pass the budget.

        Raises:
            PrivacyBudgetExceeded: ε after the step would be above ``max_epsilon``.
        """
        self.resolve()
        event, count = self._due()
        if count:
            after = self.accountant.copy()
            after.compose(event, count)
            if self.max_epsilon is not None:
                assert self.target_delta is not None
                epsilon = after.get_epsilon(self.target_delta)
                if epsilon > self.max_epsilon:
                    raise PrivacyBudgetExceeded(
                        f"step {self.steps + 1} would bring ε to {epsilon:.4f} at δ={self.target_delta:g}, above the "
                        f"budget of {self.max_epsilon:g}; the weights were not touched, so stop training here"
                    )
            self.accountant = after
        self.passes_due = 0
        self.charged_noise_multiplier = self.require_noise_multiplier()
        self._at(self.steps + 1)
        return event, count

    def _at(self, steps: int) -> None:
        """`steps` steps have been taken."""
        self.steps = steps
        if self._schedule is not None:
            self.noise_multiplier = self._schedule(steps)

    @property
    def noise_schedule(self) -> str | None:
        """The schedule in words, for reports; ``None`` where σ is constant."""
        return None if self._schedule is None else repr(self._schedule)

    def spent(self, delta: float | None) -> PrivacySpent:
        """(ε, δ) of all steps so far. 0 before the first."""
        delta = self.target_delta if delta is None else delta
        if delta is None:
            raise ValueError("target_delta is missing: the δ at which to state ε, a number in (0, 1)")
        return PrivacySpent(self.accountant.get_epsilon(delta), delta)

    def state_dict(self) -> dict[str, Any]:
        return {
            "accountant": self.accountant.state_dict(),
            "noise_multiplier": self.noise_multiplier,
            "steps": self.steps,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the ε of a saved run. A pass that was under way counts in full: the rest of it is a new one."""
        if state["batch_size"] != self.batch_size:
            raise ValueError(
                f"the saved run divides by batch_size={state['batch_size']:g}, this one by {self.batch_size:g}"
            )
        accountant = self.accountant.copy()
        accountant.load_state_dict(state["accountant"])
        self.accountant = accountant
        self.noise_multiplier = state["noise_multiplier"]
        self._at(int(state["steps"]))


def _warn(message: str) -> None:
    warnings.warn(message, PrivacyWarning, stacklevel=4)
