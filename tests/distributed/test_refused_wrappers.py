"""Ways to split a model, a sample or an update among ranks are refused by the layer's name, with the reason."""

from __future__ import annotations

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.base import topology
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2 import GroupShardedOptimizerStage2
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3

from paddle_privacy import DPAdamW, PrivacyError, UnsupportedLayer
from paddle_privacy.distributed.reducer import ReducerHooks, refuse_split_model, refuse_split_models
from paddle_privacy.distributed.step import fleet_sharding_degree


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


def private(model, **more):
    return DPAdamW(
        parameters=model.parameters(), clip_norm=1.0, noise_multiplier=1.0, batch_size=2, dataset_size=10, **more
    )


KINDS = [
    "GroupShardedStage2",
    "GroupShardedStage3",
    "FullyShard",
    "PipelineLayer",
    "PipelineParallel",
    "TensorParallel",
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
        (meta_parallel, ["PipelineLayer", "PipelineParallel", "TensorParallel", "SegmentParallel"]),
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
    optimizer = private(model)
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


@pytest.fixture
def hybrid(monkeypatch):
    """fleet's topology, of one rank until a test says otherwise."""

    class Hybrid:
        pass

    made = Hybrid()
    monkeypatch.setattr(topology, "_HYBRID_PARALLEL_GROUP", made)
    assert fleet_sharding_degree() == 1
    return made


@pytest.mark.parametrize("kind", ["model", "pipe", "sep"])
def test_fleet_topologies_that_split_samples_or_layers_are_refused(hybrid, kind):
    setattr(hybrid, f"get_{kind}_parallel_world_size", lambda: 2)
    with pytest.raises(PrivacyError, match=r"parallelism"):
        fleet_sharding_degree()
    model = nn.Linear(2, 2)
    with pytest.raises(PrivacyError, match=r"parallelism"):
        private(model)


def test_fleets_sharding_degree_is_read(hybrid):
    hybrid.get_sharding_parallel_world_size = lambda: 4
    assert fleet_sharding_degree() == 4


def test_an_update_that_a_wrapper_makes_itself_is_refused():
    model = nn.Linear(2, 2)
    optimizer = private(model)
    before = model.weight.numpy()
    with pytest.raises(PrivacyError, match="called Paddle's update itself"):
        optimizer._apply_optimize(None, None, [(model.weight, paddle.ones([2, 2]))])
    assert (model.weight.numpy() == before).all()


def test_paddles_own_sharding_of_a_private_optimizer_is_refused_and_names_ours():
    model = nn.Linear(2, 2)
    optimizer = private(model)
    before = dict(optimizer.__dict__)
    mesh = paddle.distributed.ProcessMesh([0], dim_names=["x"])
    for stage in (paddle.distributed.ShardingStage1, paddle.distributed.ShardingStage2):
        with pytest.raises(PrivacyError, match=r"paddle.distributed.shard_optimizer .*sharding_stage=2"):
            paddle.distributed.shard_optimizer(optimizer, stage("x", mesh))
    with pytest.raises(PrivacyError, match=r"group_sharded_parallel .*sharding_stage=2"):
        GroupShardedOptimizerStage2(params=model.parameters(), optim=optimizer)
    with pytest.raises(PrivacyError, match=r"p_g_os.*whole gradient norm"):
        GroupShardedStage3(model, optimizer)
    assert optimizer.__dict__ == before
    # A plain optimizer goes to Paddle as ever, which wants a GPU for it.
    plain = paddle.optimizer.AdamW(parameters=model.parameters())
    with pytest.raises(AssertionError, match="only support gpu"):
        paddle.distributed.sharding.group_sharded_parallel(model, plain, "os")


def test_one_process_has_nothing_to_shard():
    model = nn.Linear(2, 2)
    optimizer = private(model, sharding_stage=2)
    model(paddle.ones([2, 2])).mean().backward()
    optimizer.step()
    assert len(optimizer._accumulators["moment1"]) == 2
    with pytest.raises(ValueError, match="sharding_stage=3"):
        private(model, sharding_stage=3)
