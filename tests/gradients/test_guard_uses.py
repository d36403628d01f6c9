"""Ways in which a parameter's gradient could pass the taps by: each is refused."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_privacy import PrivacyError, UnsupportedLayer
from tests.gradients.guarded import _seeded, exactly, optimizer, step  # noqa: F401


class Functional(nn.Layer):
    """Uses a managed weight outside its layer."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how = nn.Linear(3, 3), how

    def forward(self, x):
        return self.how(self.inner, x)


LEAKED = (
    "parameters [{names}] got a gradient outside the captured layers (a functional use of the parameter, a direct "
    "call of layer.forward(), or another optimizer), which per-sample clipping would miss; use them only through "
    "layers called as layer(x), or clear the gradient"
)


@pytest.mark.parametrize("how", [
    lambda layer, x: F.linear(x, layer.weight, layer.bias),
    lambda layer, x: layer(x) + x @ layer.weight,
    lambda layer, x: layer(x) + layer.forward(x),
    lambda layer, x: layer(x) @ layer.weight.T,
    lambda layer, x: layer(x) * layer.weight.sum(),
    lambda layer, x: layer(x) * F.softmax(layer.weight, axis=-1).max(),
    lambda layer, x: (lambda w: layer(x) @ w)(layer.weight),
    lambda layer, x: layer(x) @ paddle.concat([layer.weight, layer.weight], axis=1),
    lambda layer, x: layer(x) + layer.bias * layer.bias,
    lambda layer, x: layer(x).add_(layer.bias),
])  # fmt: skip
def test_functional_use_inside_a_model_is_exact_or_refused(how):
    model = nn.Sequential(nn.Linear(3, 3), Functional(how))
    x = paddle.randn([4, 3])
    (model(x) ** 2).sum(1).mean().backward()
    expected = [p.grad.numpy() for p in model.parameters()]
    model.clear_gradients()
    try:
        opt = optimizer(model)
        for _ in range(2):
            start = [p.numpy() for p in model.parameters()]
            (model(x) ** 2).sum(1).mean().backward()
            opt.step()
            for parameter, gradient, value in zip(model.parameters(), expected, start):
                np.testing.assert_allclose(parameter.grad.numpy(), gradient, rtol=1e-4, atol=1e-5)
                parameter.set_value(paddle.to_tensor(value))
            opt.clear_grad()
    except PrivacyError as refused:
        assert "1.inner" in str(refused)


@pytest.mark.parametrize("use", [
    lambda model, x: (model(x) ** 2).mean() + (model[1].weight ** 2).sum(),
    lambda model, x: (F.linear(model[0](x), model[1].weight) ** 2).mean(),
    lambda model, x: (model[1].forward(model[0](x)) ** 2).mean(),
])  # fmt: skip
def test_functional_use_outside_a_model_is_refused_at_every_step(use):
    model = nn.LayerList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model.forward = lambda x: model[1](model[0](x))
    opt = optimizer(model)
    weight = model[1].weight.numpy()
    for _ in range(2):
        use(model, paddle.randn([4, 3])).backward()
        names = "'1.weight', '1.bias'" if model[1].bias.grad is not None else "'1.weight'"
        with pytest.raises(PrivacyError, match=exactly(LEAKED.format(names=names))):
            opt.step()
        opt.clear_grad()
    np.testing.assert_array_equal(weight, model[1].weight.numpy())


def test_a_use_that_begins_later_is_refused():
    later = []
    model = nn.Sequential(
        Functional(lambda layer, x: F.linear(x, layer.weight) if later else layer(x)), nn.Linear(3, 1)
    )
    opt = optimizer(model)
    step(model, opt, paddle.randn([4, 3]))
    opt.clear_grad()
    later.append(True)
    with pytest.raises(PrivacyError, match="parameters \\['0.inner.weight'\\] got a gradient outside"):
        step(model, opt, paddle.randn([4, 3]))


def test_gradient_filled_by_hand_is_refused():
    model = nn.Sequential(nn.Linear(3, 1))
    opt = optimizer(model)
    y = model(paddle.randn([4, 3]))
    model[0].weight.grad = paddle.ones([3, 1])
    (y**2).mean().backward()
    with pytest.raises(PrivacyError, match="parameters \\['0.weight'\\] got a gradient outside the captured layers"):
        opt.step()


def test_gradient_filled_after_backward_is_refused():
    model = nn.Sequential(nn.Linear(3, 1, bias_attr=False))
    opt = optimizer(model)
    (model(paddle.zeros([4, 3])) ** 2).mean().backward()
    model[0].weight.grad = paddle.ones([3, 1])
    with pytest.raises(PrivacyError, match="parameters \\['0.weight'\\] got a gradient outside the captured layers"):
        opt.step()


def test_parameter_smuggled_into_the_optimizer_is_refused():
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    opt = optimizer(model)
    opt._parameter_list.append(other.weight)
    x = paddle.randn([4, 3])
    before = other.weight.numpy()
    ((model(x) + other(x)) ** 2).mean().backward()
    with pytest.raises(
        PrivacyError,
        match=exactly(
            f"parameters ['{other.weight.name}'] were added after the optimizer was built, so their gradients are "
            "neither clipped nor noised; build a new optimizer with all parameters"
        ),
    ):
        opt.step()
    np.testing.assert_array_equal(before, other.weight.numpy())


def test_main_grad_is_refused():
    model = nn.Linear(3, 1)
    opt = optimizer(model)
    (model(paddle.randn([4, 3])) ** 2).mean().backward()
    model.weight.main_grad = paddle.ones([3, 1])
    with pytest.raises(
        PrivacyError,
        match=exactly(
            "parameters ['weight'] carry a main_grad, which Paddle's update would take instead of the noisy gradient; "
            "do not use mix_precision_utils with a private optimizer"
        ),
    ):
        opt.step()


def test_patched_instance_is_refused():
    model = nn.Sequential(nn.Linear(3, 1))
    opt = optimizer(model)
    step(model, opt, paddle.randn([4, 3]))
    model[0].forward = lambda x: F.linear(x, 2 * model[0].weight, model[0].bias)
    with pytest.raises(
        UnsupportedLayer,
        match=exactly(
            "layer '0' (Linear) has a forward of its own (the instance was patched), which the gradient rule of its "
            "class does not describe; put the change in a subclass"
        ),
    ):
        model(paddle.randn([4, 3]))


def test_pre_hook_registered_later_is_refused_and_post_hooks_are_exact():
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 3,))
    model[0].register_forward_post_hook(lambda layer, inputs, output: output * 2)
    x = paddle.randn([4, 3])
    (model(x) ** 2).sum(1).mean().backward()
    expected = model[0].weight.grad.numpy()
    model.clear_gradients()
    opt = optimizer(model)
    (model(x) ** 2).sum(1).mean().backward()
    opt.step()
    np.testing.assert_allclose(model[0].weight.grad.numpy(), expected, rtol=1e-5)
    model[0].register_forward_pre_hook(lambda layer, inputs: None)
    with pytest.raises(
        UnsupportedLayer,
        match=exactly(
            "layer '0' (Linear) got a forward_pre_hook after the optimizer was built, which would run where the "
            "layer's parameters are captured; register hooks before building the optimizer"
        ),
    ):
        model(x)


@pytest.mark.parametrize("full_graph", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_static_graph_is_refused(full_graph, inside):
    static = paddle.jit.to_static(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), full_graph=full_graph)
    model = nn.Sequential(nn.Linear(3, 3), static) if inside else static
    optimizer(model)
    path = "1" if inside else "Sequential"
    with pytest.raises(
        UnsupportedLayer,
        match=exactly(
            f"'{path}' runs as a static graph (paddle.jit.to_static), in which layers cannot be seen; train the "
            "dygraph model, and convert it for deployment"
        ),
    ):
        model(paddle.randn([4, 3]))
    with paddle.no_grad():
        assert model(paddle.randn([4, 3])).shape == [4, 1]


def test_gradient_penalty_is_refused():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    opt = optimizer(model)
    x = paddle.randn([4, 3])
    x.stop_gradient = False
    (slope,) = paddle.grad([model(x).sum()], [x], create_graph=True)
    (slope**2).sum(1).mean().backward()
    with pytest.raises(
        PrivacyError, match="^paddle.grad\\(create_graph=True\\) went through layer '2': the gradient of"
    ):
        opt.step()


def test_first_order_paddle_grad_does_not_count():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = paddle.randn([4, 3])
    x.stop_gradient = False
    opt = optimizer(model)
    y = model(x)
    (slope,) = paddle.grad([y.sum()], [x], retain_graph=True)
    (y**2).mean().backward()
    opt.step()
    assert opt.last_norms.shape == [4]


def test_activation_modified_in_place_is_refused():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    opt = optimizer(model)
    ids = paddle.to_tensor([[0, 1], [2, 3]])
    y = model(ids)
    ids.zero_()
    with pytest.raises(PrivacyError, match=exactly(
        "the input of layer '0' was modified in place after the layer read it; use the out-of-place operation"
    )):  # fmt: skip
        (y**2).mean().backward()
        opt.step()
