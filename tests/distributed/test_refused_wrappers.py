"""Ways to split a model, a sample or an update among ranks are refused by the layer's name, with the reason."""

from __future__ import annotations

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.base import topology

from paddle_privacy import DPAdamW, PrivacyError, UnsupportedLayer
from paddle_privacy.distributed.reducer import ReducerHooks, refuse_split_model, refuse_split_models
from paddle_privacy.distributed.step import refuse_hybrid_groups


def wrapper(name: str, module: str = "paddle.distributed.fleet.meta_parallel") -> type:
    """A stand-in of Paddle's class of that name, whose own constructor needs a GPU or more processes."""

    class Wrapper(nn.Layer):
        def __init__(self, inner):
            super().__init__()
            self._layer = inner

        def forward(self, *args):
            return self._layer(*args)

    Wrapper.__name__, Wrapper.__module__ = name, module
    return Wrapper


KINDS = [
    "GroupShardedStage2",
    "GroupShardedStage3",
    "FullyShard",
    "PipelineLayer",
    "PipelineParallel",
    "TensorParallel",
    "ShardingParallel",
    "SegmentParallel",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_model_is_refused_with_its_name_and_the_reason(kind):
    model = nn.Sequential(wrapper(kind)(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedLayer, match=rf"layer '0' \({kind}\): .+; train with data parallelism"):
        refuse_split_models([model], {})
    refuse_split_models([nn.Sequential(wrapper(kind, "my.models")(nn.Linear(2, 2)))], {})


def test_the_stand_ins_are_named_as_paddle_names_its_classes():
    from paddle.distributed.fleet import meta_parallel
    from paddle.distributed.fleet.meta_parallel.sharding import (
        group_sharded_fully_shard,
        group_sharded_stage2,
        group_sharded_stage3,
    )

    for owner, names in (
        (meta_parallel, ["PipelineLayer", "PipelineParallel", "TensorParallel", "ShardingParallel", "SegmentParallel"]),
        (group_sharded_stage2, ["GroupShardedStage2"]),
        (group_sharded_stage3, ["GroupShardedStage3"]),
        (group_sharded_fully_shard, ["FullyShard"]),
    ):
        for name in names:
            kind = getattr(owner, name)
            assert kind.__name__ == name and kind.__module__.startswith("paddle.")
            with pytest.raises(UnsupportedLayer):
                refuse_split_model(kind.__new__(kind), name)


def test_a_wrapper_put_around_the_model_after_the_optimizer_is_refused_at_its_first_forward():
    model = nn.Linear(2, 2)
    optimizer = DPAdamW(
        parameters=model.parameters(), clip_norm=1.0, noise_multiplier=1.0, batch_size=2, dataset_size=10
    )
    hooks = ReducerHooks(optimizer._capture, model, "Linear", say=True)
    with pytest.raises(UnsupportedLayer, match="GroupShardedStage2"):
        wrapper("GroupShardedStage2")(model)(paddle.ones([2, 2]))
    hooks.remove()


def test_a_parameter_of_which_each_rank_holds_a_part_is_refused():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight.is_distributed = True
    names = {id(p): name for name, p in model.named_parameters()}
    with pytest.raises(UnsupportedLayer, match=r"layer '0' \(Linear\): its parameter 'weight' is split among ranks"):
        refuse_split_models([model], names)


@pytest.mark.parametrize("kind", ["model", "pipe", "sharding", "sep"])
def test_fleet_topologies_other_than_data_parallel_are_refused(monkeypatch, kind):
    class Hybrid:
        pass

    hybrid = Hybrid()
    monkeypatch.setattr(topology, "_HYBRID_PARALLEL_GROUP", hybrid)
    refuse_hybrid_groups()
    setattr(hybrid, f"get_{kind}_parallel_world_size", lambda: 2)
    with pytest.raises(PrivacyError, match=r"parallelism|sharding"):
        refuse_hybrid_groups()


def test_an_update_that_a_wrapper_makes_itself_is_refused():
    model = nn.Linear(2, 2)
    optimizer = DPAdamW(
        parameters=model.parameters(), clip_norm=1.0, noise_multiplier=1.0, batch_size=2, dataset_size=10
    )
    before = model.weight.numpy()
    with pytest.raises(PrivacyError, match="called Paddle's update itself"):
        optimizer._apply_optimize(None, None, [(model.weight, paddle.ones([2, 2]))])
    assert (model.weight.numpy() == before).all()
