"""What the ranks of a run do together: agree, fail together, share the noise, and add up.

The step of rank r, with Sᵣ its clipped sum: agree that every rank is ready → charge the account (every rank its own
copy, all alike) → rank 0 writes the ledger → Sᵣ + N(0, σ²C²/W) → one all-reduce: ΣSᵣ + N(0, σ²C²), the same bits on
every rank → the update, on every rank.

With sharded optimizer states the sum is made on each parameter's owner instead (:mod:`.sharding`).

Every partial sum that leaves a rank carries noise, so a rank (or who listens to it) that knows its own share of the
noise still faces (W−1)/W of the variance. The ε that is reported is about what leaves the group as a whole.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import paddle
from paddle import Tensor
from paddle.optimizer import Optimizer

from paddle_privacy.distributed.ranks import Ranks, current_ranks
from paddle_privacy.distributed.reducer import ReducerHooks, refuse_split_models
from paddle_privacy.distributed.sharding import Shards, chosen_stage
from paddle_privacy.distributed.wrappers import watch_wrappers
from paddle_privacy.errors import PrivacyError
from paddle_privacy.noise import NoiseGenerator

if TYPE_CHECKING:
    from paddle_privacy.optimizer import PrivateOptimizer

_FINE, _FAILED, _SAVING = 0, 1, 2

CHECK_EVERY = 100
"""Steps between two comparisons of all parameters' bytes across ranks (the first two steps are compared as well)."""


class SharedStep:
    """The part of a private optimizer's step that involves the other ranks.

    Built by the optimizer on every rank at the same time; it gives all ranks rank 0's parameters, buffers and account.

    Args:
        optimizer: fully built otherwise.
        ranks: the process group.
        stage: 1 or 2 to shard the optimizer's states, 0 not to.

    Raises:
        UnsupportedLayer: the model is split among ranks.
        PrivacyError: the ranks' models differ, or communication failed.
    """

    def __init__(self, optimizer: PrivateOptimizer, ranks: Ranks, stage: int = 0):
        self.ranks = ranks
        located = optimizer._capture.located
        refuse_split_models(located.roots, located.names)
        trained = [p for p in optimizer._clipped_sum.parameters if not p.stop_gradient]
        self._compare("models", {located.names[id(p)]: f"{list(p.shape)} {p.dtype}" for p in trained})
        self.shards = Shards(ranks, optimizer._clipped_sum.parameters) if stage else None
        self._compare("optimizers", {"sharding_stage": stage, "owners": self.shards.owners if self.shards else []})
        state = {id(t): t for root in located.roots for t in (*root.parameters(), *root.buffers()) if t is not None}
        ranks.broadcast_(list(state.values()))
        optimizer.spending.load_state_dict(ranks.gather_objects(optimizer.spending.state_dict())[0])
        self._hooks = [ReducerHooks(optimizer._capture, r, type(r).__name__, say=ranks.leader) for r in located.roots]
        # An optimizer that is dropped leaves no hooks behind.
        self.remove_hooks = weakref.finalize(self, _remove, self._hooks)
        for hooks, root in zip(self._hooks, located.roots):
            if isinstance(root, paddle.DataParallel):
                hooks.stand_down(root)

    # Before the step

    def agree(self, optimizer: PrivateOptimizer) -> None:
        """Returns on all ranks or raises on all: every rank has its samples, and all are about to do the same.

        Raises:
            PrivacyError: another rank failed, or settings, accounts or parameters differ. Nothing has been spent.
        """
        spending = optimizer.spending
        settings = {
            "step": spending.steps,
            "noise multiplier": spending.noise_multiplier,
            "clip norm": optimizer.clip_norm,
            "batch_size": optimizer.batch_size,
            "loss_reduction": optimizer.loss_reduction,
            "sampling": spending.kind,
            "dataset size": spending.num_rows,
            "learning rate": float(optimizer.get_lr()),
            "ledger in use": optimizer._ledger is not None,
            "budget": spending.max_epsilon,
            "frozen parameters": [i for i, p in enumerate(optimizer._clipped_sum.parameters) if p.stop_gradient],
        }
        if spending.steps < 2 or spending.steps % CHECK_EVERY == 0:
            settings["account"] = spending.accountant.state_dict()
            settings["parameters"] = parameter_bytes_digest(optimizer._clipped_sum.parameters)
        words = [_FINE, _word(settings), spending.passes_due]
        told = self.ranks.gather(words)
        self._raise_failures(told[:, 0], None)
        if (told[:, 1] != told[0, 1]).any():
            self._compare("ranks", settings)
        # A pass that one rank saw begin has begun: a row of it may be in this step.
        spending.passes_due = int(told[:, 2].max())

    def report(self, failure: BaseException) -> None:
        """Tells the other ranks, which wait in :meth:`agree`, that this one cannot step. They raise too."""
        told = self.ranks.gather([_FAILED, 0, 0])
        self._raise_failures(told[:, 0], failure)

    def confirm_record(self, failure: BaseException | None) -> None:
        """After rank 0 wrote the ledger, or failed to: the step happens nowhere or everywhere."""
        told = self.ranks.gather([_FINE if failure is None else _FAILED, 0, 0])
        self._raise_failures(told[:, 0], failure)

    def take_part_in_saving(self, optimizer: PrivateOptimizer, keep: bool) -> dict[str, Any]:
        """Paddle's state of the optimizer, whole where `keep`; under sharding all ranks must call it.

        Raises:
            PrivacyError: another rank is making a step instead. Both raise.
        """
        if self.shards is None:
            return Optimizer.state_dict(optimizer)
        told = self.ranks.gather([_SAVING, 0, 0])
        if (told[:, 0] != _SAVING).any():
            alone = PrivacyError(
                "the optimizer's state is sharded, so all ranks must call state_dict() or save_checkpoint() at the "
                f"same point; rank {self.ranks.rank} did and others did not"
            )
            self._raise_failures(told[:, 0], alone)
            raise alone
        return self.shards.whole_state(optimizer, keep)

    def _raise_failures(self, codes: Any, own: BaseException | None) -> None:
        if not codes.any():
            return
        words = self.ranks.gather_objects(None if own is None else f"{type(own).__name__}: {own}")
        if own is None:
            reasons = "; ".join(f"rank {rank}: {word}" for rank, word in enumerate(words) if word is not None)
            raise PrivacyError(f"no rank made this step, because of {reasons}")

    def _compare(self, what: str, settings: dict[str, Any]) -> None:
        """Raises, naming the settings that differ from rank 0's; returns where none does."""
        everyone = self.ranks.gather_objects(json.loads(json.dumps(settings)))
        for rank, theirs in enumerate(everyone):
            differing = sorted(n for n in {*everyone[0], *theirs} if theirs.get(n) != everyone[0].get(n))
            if not differing:
                continue
            if differing == ["parameters"]:
                raise PrivacyError(
                    f"the parameters of rank {rank} are no longer those of rank 0 (something other than the private "
                    "optimizer changed them, or the ranks compute differently); restart from the last checkpoint"
                )
            shown = {n: (everyone[0].get(n), theirs.get(n)) for n in differing[:5] if n != "account"}
            raise PrivacyError(
                f"the {what} disagree in {differing[:5]}: rank 0 and rank {rank} have {shown}; build the optimizer "
                "alike on all ranks, and change the learning rate once a step and not once a piece of a batch"
            )

    # The sum

    def update(
        self, sums: list[Tensor | None], std: float, noise: NoiseGenerator, apply: Callable[[list[Tensor | None]], None]
    ) -> None:
        """The update by Σ over ranks of `sums` plus N(0, std²) in every coordinate; bitwise equal on all ranks.

        Args:
            sums: this rank's clipped sums, float32 or float64; consumed.
            std: σC, the standard deviation of the noise in the total.
            noise: this rank's generator.
            apply: the optimizer's update, given the noisy total (None for a parameter that another rank owns).
        """
        # W independent shares of variance std²/W. Nothing leaves this rank without its share.
        mine = [tensor for tensor in sums if tensor is not None]
        noise.add_noise(mine, std / math.sqrt(self.ranks.world))
        if self.shards is not None:
            del mine
            self.shards.update(sums, apply)
        else:
            apply([*self.ranks.sum_(mine)])

    def noised_number(self, value: float, std: float, noise: NoiseGenerator) -> float:
        """Σ over ranks of `value`, plus N(0, std²)."""
        share = std / math.sqrt(self.ranks.world) * float(noise.standard_normal([1])[0])
        (total,) = self.ranks.sum_([paddle.to_tensor([value + share], dtype="float64")])
        return float(total)


def run_stage(asked: int | None) -> int:
    """The sharding stage of a run: what the user asks for, else what fleet was initialised with.

    Raises:
        ValueError: the stage does not exist or cannot be made private.
        PrivacyError: fleet divides the ranks so that a rank does not hold whole samples and gradients.
    """
    watch_wrappers()
    return chosen_stage(asked, fleet_sharding_degree())


def join_ranks(optimizer: PrivateOptimizer, stage: int) -> SharedStep | None:
    """The shared step of an optimizer that is being built; None in a run of one process, which has nothing to shard."""
    ranks = current_ranks()
    return None if ranks is None else SharedStep(optimizer, ranks, stage)


def _remove(hooks: list[ReducerHooks]) -> None:
    for hook in hooks:
        hook.remove()


def same_group(shared: SharedStep | None) -> None:
    """Raises PrivacyError where ``paddle.distributed`` was initialised, or ended, after the optimizer was built."""
    ranks = current_ranks()
    before, now = (1 if shared is None else shared.ranks.world), (1 if ranks is None else ranks.world)
    if before != now:
        raise PrivacyError(
            f"the optimizer was built for {before} process(es), and now there are {now}; call "
            "paddle.distributed.init_parallel_env() before building sampler and optimizer"
        )


def rank_noise(noise: NoiseGenerator) -> NoiseGenerator:
    """The generator for this rank: a secure one as it is (its key is its own), a seeded one on a stream of its own."""
    ranks = current_ranks()
    if ranks is None or noise.secure:
        return noise
    # A copy never continues the stream that it was copied from, and the k-th copy is not the j-th.
    for _ in range(ranks.rank):
        own = copy.copy(noise)
    return own if ranks.rank else noise


def fleet_sharding_degree() -> int:
    """The sharding_degree that fleet was initialised with; 1 without fleet.

    Raises:
        PrivacyError: fleet divides the ranks so that a rank does not hold whole samples and gradients.
    """
    topology = sys.modules.get("paddle.distributed.fleet.base.topology")
    hybrid = getattr(topology, "_HYBRID_PARALLEL_GROUP", None)

    def degree(kind: str) -> int:
        return int(getattr(hybrid, f"get_{kind}_parallel_world_size", lambda: 1)())

    for name, kind in (
        ("model", "tensor parallelism (mp_degree)"),
        ("pipe", "pipeline parallelism (pp_degree)"),
        ("sep", "segment parallelism (sep_degree)"),
    ):
        if degree(name) > 1:
            raise PrivacyError(
                f"fleet was initialised with {kind} of {degree(name)}, under which a rank does not hold whole samples "
                "and gradients; set that degree to 1 and use data parallelism, with sharding_degree where memory is "
                "short"
            )
    return degree("sharding")


def parameter_bytes_digest(parameters: list[Tensor]) -> str:
    """A hash of all the parameters' bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        digest.update(parameter.numpy().tobytes())
    return digest.hexdigest()


def _word(settings: dict[str, Any]) -> int:
    text = json.dumps(settings, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
