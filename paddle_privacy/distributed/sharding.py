"""Optimizer states, and summed gradients, that live on one rank each (ZeRO stages 1 and 2, Rajbhandari et al. 2020).

Every parameter has an owner among the ranks. Each rank clips and adds whole gradients of whole samples, as without
sharding, and adds its share of the noise; the noisy sum is then added up on the owner alone, which holds the moments
and master weight, makes the update, and sends the new value to all. Stage 1 would keep the sum on all ranks: that
moves half as many bytes again and saves nothing, so both stages are this one (as in Paddle, whose "os" is "os_g").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.optimizer import Optimizer

from paddle_privacy.distributed.ranks import Ranks
from paddle_privacy.errors import PrivacyError

if TYPE_CHECKING:
    from paddle_privacy.optimizer import PrivateOptimizer

MASTER_WEIGHTS = "master_weights"


class Shards:
    """Who owns which parameter, and the parts of a step and of a checkpoint that follow from it.

    Args:
        ranks: all ranks of the run.
        parameters: the managed parameters, in the same order on every rank.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[Tensor]):
        self.ranks, self.parameters = ranks, list(parameters)
        self.owners = balanced_owners(
            [int(p.size) for p in parameters], [not p.stop_gradient for p in parameters], ranks.world
        )

    def update(self, sums: list[Tensor | None], apply: Callable[[list[Tensor | None]], None]) -> None:
        """One update of all parameters on all ranks.

        Args:
            sums: this rank's clipped sums with its share of the noise; consumed.
            apply: makes the optimizer's update of those parameters whose sum it is given.

        Raises:
            PrivacyError: communication failed; this rank's parameters are then what they were.
        """
        trained = [i for i, p in enumerate(self.parameters) if not p.stop_gradient]
        parameters, owners = [self.parameters[i] for i in trained], [self.owners[i] for i in trained]
        for i, parameter in enumerate(self.parameters):
            if parameter.stop_gradient:
                sums[i] = None
        totals = self.ranks.sum_on_owners(sums, self.owners)
        own = [p for p, owner in zip(parameters, owners) if owner == self.ranks.rank]
        before = [p.clone() for p in own]
        try:
            apply(totals)
            del totals
            # All new values are here before the first is written.
            received = self.ranks.from_owners(parameters, owners)
        except BaseException as failure:
            for parameter, value in zip(own, before):
                parameter.set_value(value)
            self.ranks.abandon(
                f"rank {self.ranks.rank} failed in the middle of an update that the ranks share ({failure}); restart "
                "all ranks from the last checkpoint"
            )
            raise
        for parameter, new in zip(parameters, received):
            if new is not None:
                parameter.set_value(new)

    # Checkpoints

    def whole_state(self, optimizer: PrivateOptimizer, keep: bool = True) -> dict[str, Any]:
        """Paddle's state of the optimizer with the parts of all owners; every rank must call it.

        Args:
            optimizer: the one that these shards are of.
            keep: False on a rank that only sends: the result is then its own part.
        """
        state = Optimizer.state_dict(optimizer)
        master = dict(state.pop(MASTER_WEIGHTS, {}))
        mine: list[tuple[int, str, Tensor]] = []
        for name, value in state.items():
            place = self._place_of(name) if isinstance(value, Tensor) else None
            if place is not None:
                mine.append((*place, value))
        mine += [(*self._require_place_of(name), value) for name, value in master.items()]
        listed = [
            [i, ending, list(t.shape), str(t.dtype).rpartition(".")[2], t.place.is_cpu_place()] for i, ending, t in mine
        ]
        for owner, entries in enumerate(self.ranks.gather_objects(listed)):
            for k, (i, ending, shape, dtype, on_host) in enumerate(entries):
                if owner == self.ranks.rank:
                    sent, place = mine[k][2], self.parameters[i].place
                    # Communication is between the devices that the parameters are on.
                    self.ranks.broadcast_([sent.detach().to(place)], owner)
                    continue
                value = paddle.empty(shape, dtype=dtype)
                self.ranks.broadcast_([value], owner)
                if keep:
                    name = self.parameters[i].name + ending
                    (state if ending else master)[name] = value.cpu() if on_host else value
        if master:
            state[MASTER_WEIGHTS] = master
        return state

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of a whole state this rank holds."""

        def kept(name: str, value: Any) -> bool:
            place = self._place_of(name) if isinstance(value, Tensor) else None
            return place is None or self.owners[place[0]] == self.ranks.rank

        own = {name: value for name, value in state.items() if kept(name, value)}
        if MASTER_WEIGHTS in own:
            own[MASTER_WEIGHTS] = {n: value for n, value in own[MASTER_WEIGHTS].items() if kept(n, value)}
        return own

    def _place_of(self, name: str) -> tuple[int, str] | None:
        """The parameter that a state named "<parameter>_<...>" is of, by index, and the rest of the name.

        Ranks may have numbered their layers differently, so names mean nothing to another rank.
        """
        fitting = [i for i, p in enumerate(self.parameters) if name == p.name or name.startswith(p.name + "_")]
        if not fitting:
            return None
        i = max(fitting, key=lambda i: len(self.parameters[i].name))
        return i, name[len(self.parameters[i].name) :]

    def _require_place_of(self, name: str) -> tuple[int, str]:
        place = self._place_of(name)
        if place is None:
            raise PrivacyError(f"the optimizer holds a master weight of '{name}', which is none of its parameters")
        return place


def balanced_owners(sizes: Sequence[int], trained: Sequence[bool], world: int) -> list[int]:
    """The owner of each parameter: the largest first, to the rank that has least; the same on every rank.

    Frozen parameters are dealt out separately, so that they do not push the trained ones together; one that is
    unfrozen later has an owner already.
    """
    owners = [0] * len(sizes)
    for kind in (True, False):
        held = np.zeros(world, dtype=np.int64)
        for i in sorted((i for i, t in enumerate(trained) if t is kind), key=lambda i: (-sizes[i], i)):
            owners[i] = int(held.argmin())
            held[owners[i]] += sizes[i]
    return owners


def chosen_stage(asked: int | None, fleet_degree: int) -> int:
    """The stage that the user asked for, or else what fleet was initialised with.

    Raises:
        ValueError: not a stage, or one that keeps parts of parameters on a rank.
    """
    if asked is None:
        return 2 if fleet_degree > 1 else 0
    if isinstance(asked, bool) or asked not in (0, 1, 2, 3):
        raise ValueError(f"sharding_stage must be 0 (none), 1 or 2, found {asked!r}")
    if asked == 3:
        raise ValueError(
            "sharding_stage=3 keeps a slice of each parameter on a rank, so no rank sees a sample's whole gradient "
            "norm; use sharding_stage=2, with LoRA or recompute where memory is short"
        )
    return int(asked)
