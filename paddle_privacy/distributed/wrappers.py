"""Paddle's wrappers of an optimizer, around a private one.

They exchange raw gradients, and call the wrapped optimizer's update themselves: past clipping and noise. What fleet's
wrapper is asked for (data parallelism, sharded states) the private optimizer does itself, so that wrapper only passes
calls on. The others are refused where they are built.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from paddle.distributed.auto_parallel import api
from paddle.distributed.fleet.base.topology import ParallelMode
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import HybridParallelOptimizer
from paddle.distributed.fleet.meta_parallel.sharding import (
    group_sharded_optimizer_stage2,
    group_sharded_stage3,
)

from paddle_privacy.errors import PrivacyError

_WATCHED = "_paddle_privacy_watched"
_OURS = "leave it out and build the private optimizer with sharding_stage=2, which shards states and summed gradients"

_REFUSED = {
    group_sharded_optimizer_stage2.GroupShardedOptimizerStage2: ("optim", "group_sharded_parallel", _OURS),
    group_sharded_stage3.GroupShardedStage3: (
        "optimizer",
        "group_sharded_parallel(level='p_g_os')",
        "no rank sees a sample's whole gradient norm where parameters are sliced; " + _OURS,
    ),
    api._ShardOptimizer: ("optimizer", "paddle.distributed.shard_optimizer", _OURS),
}


class _OnlyData:
    """fleet's topology as an optimizer sees it that has nothing to exchange: without sharding, and data parallel."""

    def __init__(self, topology: Any):
        self._topology = topology

    def get_sharding_parallel_world_size(self) -> int:
        return 1

    def get_parallel_mode(self) -> int:
        return ParallelMode.DATA_PARALLEL

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topology, name)


def watch_wrappers() -> None:
    """From now on Paddle's wrappers know a private optimizer when they are given one. Idempotent."""
    if hasattr(HybridParallelOptimizer.__init__, _WATCHED):
        return
    _watch(HybridParallelOptimizer, "optimizer", _stand_aside)
    for wrapper, (argument, name, what_to_do) in _REFUSED.items():
        _watch(wrapper, argument, functools.partial(_refuse, name, what_to_do))


def _watch(wrapper: type, argument: str, meet: Any) -> None:
    original: Any = wrapper.__init__  # type: ignore[misc]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        from paddle_privacy.optimizer import PrivateOptimizer

        bound = signature.bind(self, *args, **kwargs)
        if isinstance(bound.arguments.get(argument), PrivateOptimizer):
            meet(bound.arguments)
        original(*bound.args, **bound.kwargs)

    setattr(init, _WATCHED, True)
    wrapper.__init__ = init  # type: ignore[misc]


def _stand_aside(arguments: dict[str, Any]) -> None:
    arguments["hcg"] = _OnlyData(arguments["hcg"])


def _refuse(name: str, what_to_do: str, arguments: dict[str, Any]) -> None:
    raise PrivacyError(
        f"{name} exchanges raw gradients and makes the update itself, past clipping and noise; {what_to_do}"
    )
