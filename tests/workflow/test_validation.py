from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_privacy.errors import UnsupportedLayer
from paddle_privacy.validation import ModuleValidator


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2D(3, 64, 3)
        self.norm = nn.BatchNorm2D(64)
        self.shared = self.norm

    def forward(self, x):
        return self.shared(self.norm(self.conv(x)))


def fixable() -> nn.Layer:
    return nn.Sequential(
        Block(),
        nn.Sequential(nn.SyncBatchNorm(6), nn.BatchNorm1D(16, data_format="NLC")),
        nn.BatchNorm3D(7, weight_attr=False, bias_attr=False),
        nn.BatchNorm(8),
        nn.utils.spectral_norm(nn.Linear(5, 4)),
        nn.utils.weight_norm(nn.Linear(5, 4)),
    )


def test_every_problem_is_listed_with_its_path():
    model = fixable()
    problems = ModuleValidator.validate(model)
    assert [p.path for p in problems] == ["0.norm", "1.0", "1.1", "2", "3", "4", "5"]
    assert all(p.change for p in problems)
    with pytest.raises(UnsupportedLayer, match=r"(?s)7 layer\(s\).*'0\.norm'.*'1\.0'.*'5'"):
        ModuleValidator.validate(model, strict=True)


def test_fix_replaces_all_and_keeps_parameters_and_their_keys():
    model = fixable()
    held = {id(p) for p in model[0].parameters()} | {id(p) for p in model[3].parameters()}
    keys = set(model.state_dict())
    assert ModuleValidator.fix(model) is model
    assert ModuleValidator.validate(model) == []
    assert {id(p) for p in model[0].parameters()} | {id(model[3].weight), id(model[3].bias)} <= held
    gone = keys - set(model.state_dict())
    assert all(
        k.rsplit(".", 1)[1] in ("_mean", "_variance", "weight_orig", "weight_u", "weight_v", "weight_g") for k in gone
    )
    assert set(model.state_dict()) - keys == {"4.weight", "5.weight"}
    assert model[0].norm is model[0].shared
    assert isinstance(model[0].norm, nn.GroupNorm)


def test_a_dry_run_prints_and_changes_nothing(capsys):
    model = fixable()
    before = list(model.state_dict())
    assert ModuleValidator.fix(model, dry_run=True) is model
    said = capsys.readouterr().out
    assert said.count("GroupNorm(num_groups=") == 5
    assert "layer '0.norm' (BatchNorm2D)" in said
    assert list(model.state_dict()) == before
    assert len(ModuleValidator.validate(model)) == 7


@pytest.mark.parametrize(
    ("old", "shape"),
    [
        (nn.BatchNorm1D(16), [4, 16]),
        (nn.BatchNorm1D(16), [4, 16, 5]),
        (nn.BatchNorm1D(16, data_format="NLC"), [4, 5, 16]),
        (nn.BatchNorm2D(16), [4, 16, 3, 3]),
        (nn.BatchNorm2D(16, data_format="NHWC"), [4, 3, 3, 16]),
        (nn.BatchNorm3D(4), [4, 4, 2, 3, 3]),
        (nn.BatchNorm2D(1), [4, 1, 3, 3]),
        (nn.BatchNorm1D(7), [4, 7]),
    ],
)
@pytest.mark.parametrize("replacement", ["group", "instance"])
def test_the_replacement_takes_the_same_input_and_does_not_mix(old, shape, replacement):
    """Each row's output is what it is alone, and is not degenerate (a group of one value would always give zero)."""
    new = ModuleValidator.fix(nn.Sequential(old), replacement=replacement)
    x = paddle.randn(shape)
    together = new(x).numpy()
    alone = np.concatenate([new(x[i : i + 1]).numpy() for i in range(shape[0])])
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)
    assert together.std() > 0.5


def test_normalisation_weights_carry_over():
    old = nn.BatchNorm2D(8)
    old.weight.set_value(paddle.arange(8, dtype="float32"))
    old.bias.set_value(paddle.full([8], 3.0))
    old.weight.stop_gradient = True
    new = ModuleValidator.fix(old)
    assert isinstance(new, nn.GroupNorm)
    x = paddle.randn([2, 8, 4, 4])
    plain = nn.functional.group_norm(x, new._num_groups, 1e-5)
    want = plain * paddle.arange(8, dtype="float32").reshape([1, 8, 1, 1]) + 3.0
    np.testing.assert_allclose(new(x).numpy(), want.numpy(), rtol=1e-5, atol=1e-5)
    assert new.weight.stop_gradient
    assert not new.bias.stop_gradient


def test_folded_weights_compute_the_same():
    for wrap in (nn.utils.spectral_norm, nn.utils.weight_norm):
        layer = wrap(nn.Linear(5, 4))
        x = paddle.randn([3, 5])
        layer.eval()
        want = layer(x).numpy()
        model = nn.Sequential(layer)
        ModuleValidator.fix(model)
        np.testing.assert_allclose(model(x).numpy(), want, rtol=1e-5, atol=1e-6)
        assert {n for n, _ in model.named_parameters()} == {"0.weight", "0.bias"}


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.BatchNorm(4, act="relu"), "activation 'relu'"),
        (nn.BatchNorm1D(1), "one channel"),
        (nn.SpectralNorm([4, 4]), "outside the layer that owns it"),
    ],
)
def test_what_a_person_has_to_decide_is_left_and_said(layer, says):
    model = nn.Sequential(nn.Linear(3, 3), layer)
    ModuleValidator.fix(model)
    (problem,) = ModuleValidator.validate(model)
    assert model[1] is layer
    assert problem.path == "1"
    assert problem.change is None
    assert says in str(problem)


def test_what_a_gradient_rule_refuses_is_a_problem_unless_frozen():
    from paddle_privacy import register_grad_rule

    class Own(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = self.create_parameter([3])

        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(nn.Linear(3, 3), Own())
    assert ModuleValidator.is_valid(model)

    @register_grad_rule(Own, refuses=lambda layer: "sums over the batch; use a mean over positions")
    def own(layer, inputs, output_grad):
        return {"scale": inputs[0] * output_grad}

    (problem,) = ModuleValidator.validate(model)
    assert str(problem) == "layer '1' (Own): sums over the batch; use a mean over positions"
    model[1].scale.stop_gradient = True
    assert ModuleValidator.is_valid(model)


def test_statistics_that_are_not_of_the_batch_are_fine():
    frozen = nn.BatchNorm2D(4)
    frozen.eval()
    model = nn.Sequential(
        nn.BatchNorm2D(4, use_global_stats=True),
        nn.LayerNorm(4),
        nn.InstanceNorm2D(3, weight_attr=False, bias_attr=False),
    )
    model.add_sublayer("3", frozen)
    assert ModuleValidator.validate(model) == []
    model.train()
    assert [p.path for p in ModuleValidator.validate(model)] == ["3"]


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="module"):
        ModuleValidator.validate([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="replacement"):
        ModuleValidator.fix(nn.Linear(1, 1), replacement="layer")
