"""check_independence: what couples samples is found and named, what does not is not accused."""

from __future__ import annotations

import re

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_privacy import DPSGD, PrivacyError, check_independence

ADVICE = (
    "use layers that work within one sample (GroupNorm, LayerNorm) and a loss that is a mean of one loss a row, each a "
    "mean over that row's own tokens"
)


def exactly(message):
    return "^" + re.escape(message) + "$"


@pytest.fixture(autouse=True)
def _seeded():
    paddle.seed(0)
    np.random.seed(0)


def mean_squares(model, x):
    return (model(x) ** 2).mean()


class Tokens(nn.Layer):
    """[B, T] ids -> [B, T, V] logits."""

    def __init__(self, vocabulary=7):
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, 4), nn.Linear(4, vocabulary)

    def forward(self, ids):
        return self.head(self.words(ids))


def token_mean(model, ids, labels):
    kept = (labels != -100).astype("float32")
    return (F.cross_entropy(model(ids), labels, reduction="none").squeeze(-1) * kept).sum() / kept.sum()


def row_mean(model, ids, labels):
    losses = F.cross_entropy(model(ids), labels, ignore_index=-100, reduction="none").squeeze(-1)
    kept = (labels != -100).astype("float32")
    return ((losses * kept).sum(1) / kept.sum(1).clip(min=1)).mean()


def test_layers_within_a_sample_pass():
    convolution = [nn.Conv2D(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()]
    model = nn.Sequential(*convolution, nn.Linear(36, 5), nn.LayerNorm(5))
    x = paddle.randn([4, 3, 5, 5])
    check_independence(model, mean_squares, x)
    check_independence(model, lambda m, x: (m(x) ** 2).sum(1), x)
    check_independence(model, lambda m, x: m(x).abs().sum(), x)


def test_recurrent_and_attention_layers_pass():
    class Sequence(nn.Layer):
        def __init__(self):
            super().__init__()
            self.recurrent = nn.LSTM(3, 4, time_major=True)
            self.attention = nn.MultiHeadAttention(4, 2)

        def forward(self, x):
            h, _ = self.recurrent(x.transpose([1, 0, 2]))
            return self.attention(h.transpose([1, 0, 2])).sum(1)

    check_independence(Sequence(), mean_squares, paddle.randn([3, 3, 3]))


@pytest.mark.parametrize("norm", [
    lambda: nn.BatchNorm1D(3),
    lambda: nn.BatchNorm1D(3, weight_attr=False, bias_attr=False),
    lambda: nn.BatchNorm(3),
])  # fmt: skip
@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_in_training_mode(norm, frozen):
    norm = norm()
    model = nn.Sequential(nn.Linear(3, 3), norm, nn.Linear(3, 2))
    norm.train()
    for parameter in [p for p in (norm.weight, norm.bias) if p is not None]:
        parameter.stop_gradient = frozen
    statistics = norm._mean.numpy()
    kind = type(norm).__name__
    with pytest.raises(PrivacyError, match=exactly(
        f"samples are coupled by layer '1' ({kind}): replacing sample 0 moved its output for sample 1; {ADVICE}"
    )):  # fmt: skip
        check_independence(model, mean_squares, paddle.randn([4, 3]))
    np.testing.assert_array_equal(norm._mean.numpy(), statistics)
    norm.eval()
    check_independence(model, mean_squares, paddle.randn([4, 3]))


def test_mean_over_the_batchs_tokens():
    ids = paddle.to_tensor([[1, 2, 3], [4, 5, 6], [1, 3, 5]])
    labels = paddle.to_tensor([[1, 2, 3], [4, -100, -100], [1, 3, -100]])
    with pytest.raises(PrivacyError, match=exactly(
        "samples are coupled by the loss: replacing sample 0 moved the gradient of sample 1 at layer 'Tokens' "
        f"(Tokens), the last layer before it; {ADVICE}"
    )):  # fmt: skip
        check_independence(Tokens(), token_mean, ids, labels)
    check_independence(Tokens(), row_mean, ids, labels)


def test_mean_over_the_batchs_tokens_where_every_row_has_as_many():
    ids = paddle.to_tensor([[1, 2, 3], [4, 5, 6], [1, 3, 5]])
    labels = (ids + 1) % 7
    with pytest.raises(PrivacyError, match="^samples are coupled by the loss: ignoring some tokens of sample 0 moved"):
        check_independence(Tokens(), token_mean, ids, labels)
    # Paddle's own mean leaves ignored tokens out of the divisor where ignore_index >= 0.
    with pytest.raises(PrivacyError, match="^samples are coupled by the loss: ignoring some tokens of sample 0 moved"):
        check_independence(Tokens(), lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=0), ids, 1 + ids % 6)
    mask = paddle.ones([3, 3])
    with pytest.raises(PrivacyError, match="^samples are coupled by the loss: ignoring some tokens of sample 0 moved"):
        check_independence(Tokens(), lambda m, x, w: (m(x).sum(-1) ** 2 * w).sum() / w.sum(), ids, mask)
    check_independence(Tokens(), row_mean, ids, labels)


def test_class_weights():
    weights = paddle.to_tensor([1.0, 10.0])
    model = nn.Linear(3, 2)
    x, y = paddle.randn([4, 3]), paddle.to_tensor([0, 1, 0, 1])
    with pytest.raises(PrivacyError, match="^samples are coupled by the loss: replacing sample 0"):
        check_independence(model, lambda m, x, y: F.cross_entropy(m(x), y, weight=weights), x, y)
    check_independence(model, lambda m, x, y: F.cross_entropy(m(x), y), x, y)


def test_contrastive_loss():
    def contrastive(model, x):
        z = F.normalize(model(x))
        return F.cross_entropy(z @ z.T / 0.1, paddle.arange(len(x)))

    with pytest.raises(
        PrivacyError, match="^samples are coupled by the loss: replacing sample 0 moved the gradient of"
    ):
        check_independence(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), contrastive, paddle.randn([5, 3]))


def test_coupling_between_layers_names_the_next_one():
    class Centred(nn.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            x = self.first(x)
            return self.last(x - x.mean(axis=0))

    with pytest.raises(PrivacyError, match=exactly(
        f"samples are coupled before layer 'last' (Linear): replacing sample 0 moved its input for sample 1; {ADVICE}"
    )):  # fmt: skip
        check_independence(Centred(), mean_squares, paddle.randn([4, 3]))


def test_coupling_between_two_models_in_user_code():
    encoder, head = nn.Linear(3, 3), nn.Linear(3, 1)

    def loss(model, x):
        z = model[0](x)
        return (model[1](z - z.mean(axis=0)) ** 2).mean()

    with pytest.raises(PrivacyError, match="^samples are coupled before layer '1' \\(Linear\\)"):
        check_independence(nn.LayerList([encoder, head]), loss, paddle.randn([4, 3]))


def test_nothing_is_left_behind_and_a_private_optimizer_is_not_disturbed():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    optimizer = DPSGD(
        parameters=model.parameters(),
        learning_rate=0.1,
        clip_norm=1.0,
        noise_multiplier=0.0,
        batch_size=4,
        sampling="none",
    )
    hooks = [len(layer._forward_post_hooks) for layer in model.sublayers(include_self=True)]
    state = paddle.get_rng_state()[0].current_seed(), np.random.get_state()[2]
    check_independence(model, mean_squares, paddle.randn([4, 3]))
    assert (paddle.get_rng_state()[0].current_seed(), np.random.get_state()[2]) == state
    assert hooks == [len(layer._forward_post_hooks) for layer in model.sublayers(include_self=True)]
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(PrivacyError, match="^step\\(\\) without a backward"):
        optimizer.step()
    mean_squares(model, paddle.randn([4, 3])).backward()
    optimizer.step()
    assert optimizer.last_norms.shape == [4]


def test_gradients_that_were_there_are_put_back():
    model = nn.Linear(3, 1)
    mean_squares(model, paddle.randn([4, 3])).backward()
    before = [p.grad.numpy() for p in model.parameters()]
    check_independence(model, mean_squares, paddle.randn([4, 3]))
    for parameter, gradient in zip(model.parameters(), before):
        np.testing.assert_array_equal(parameter.grad.numpy(), gradient)


def test_what_cannot_be_proven_is_refused():
    source = np.random.default_rng(0)
    with pytest.raises(PrivacyError, match="^the model or the loss computes something else when it is run again"):
        check_independence(nn.Linear(3, 1), lambda m, x: (m(x) * float(source.random())).mean(), paddle.randn([4, 3]))
    with pytest.raises(ValueError, match=exactly("batch must hold at least two rows on the first axis of its tensors")):
        check_independence(nn.Linear(3, 1), mean_squares, paddle.randn([1, 3]))
    with pytest.raises(ValueError, match=exactly("batch must hold rows that differ, or replacing one shows nothing")):
        check_independence(nn.Linear(3, 1), mean_squares, paddle.full([4, 3], 2.0))
    with pytest.raises(TypeError, match="^loss_fn must return a tensor, found float$"):
        check_independence(nn.Linear(3, 1), lambda m, x: 1.0, paddle.randn([4, 3]))
