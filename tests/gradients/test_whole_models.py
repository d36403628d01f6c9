"""Whole models against one-by-one autograd: PaddleNLP's, and the usual ones of paddle.nn."""

from __future__ import annotations

import warnings

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from tests.gradients.parity import assert_parity, built, randomise, tensor

paddlenlp = pytest.importorskip("paddlenlp", reason="the ernie extra is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from paddlenlp import transformers as T
    from paddlenlp.peft import LoRAConfig, LoRAModel, PrefixConfig, PrefixModelForCausalLM, VeRAConfig, VeRAModel
    from paddlenlp.peft.prefix import llama_postprocess_past_key_value

B, STEPS, VOCABULARY = 3, 6, 20
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "type_vocab_size": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA = {k: SIZES[k] for k in list(SIZES)[:6]}


@pytest.fixture(autouse=True)
def float64():
    paddle.set_default_dtype("float64")
    yield
    paddle.set_default_dtype("float32")


def token_ids(low: int = 1):
    return paddle.to_tensor(np.random.default_rng(0).integers(low, VOCABULARY, [B, STEPS]))


def loss_of(run):
    """A [B] loss that weighs every element of what ``run(model, *inputs)`` returns first."""

    def loss_fn(model, *inputs):
        out = run(model, *inputs)
        out = out[0] if isinstance(out, tuple) else out
        weights = np.random.default_rng(1).standard_normal([1, *out.shape[1:]])
        return (paddle.tanh(out) * paddle.to_tensor(weights, dtype=out.dtype)).reshape([out.shape[0], -1]).sum(axis=1)

    return loss_fn


MODELS = {
    "ernie": lambda: T.ErnieForSequenceClassification(T.ErnieConfig(**SIZES, num_labels=2)),
    "bert": lambda: T.BertForSequenceClassification(T.BertConfig(**SIZES, num_labels=2)),
    "ernie-masked-lm": lambda: T.ErnieForMaskedLM(T.ErnieConfig(**SIZES)),
    "bert-masked-lm": lambda: T.BertForMaskedLM(T.BertConfig(**SIZES)),
    "roberta-masked-lm": lambda: T.RobertaForMaskedLM(T.RobertaConfig(**SIZES)),
    "electra-masked-lm": lambda: T.ElectraForMaskedLM(T.ElectraConfig(**SIZES, embedding_size=8)),
    "gpt-causal-lm": lambda: T.GPTForCausalLM(T.GPTConfig(**SIZES)),
    "gpt-lm-head": lambda: T.GPTLMHeadModel(T.GPTConfig(**SIZES)),
}
TIED = {
    "ernie-masked-lm": "ernie.embeddings.word_embeddings.weight",
    "bert-masked-lm": "bert.embeddings.word_embeddings.weight",
    "gpt-causal-lm": "gpt.embeddings.word_embeddings.weight",
}


@pytest.mark.parametrize("name", MODELS)
def test_paddlenlp_model(name):
    model = randomise(MODELS[name]())
    model.train()
    factors = assert_parity(model, loss_of(lambda m, ids: m(ids)), [token_ids()], reduction="mean")
    if name in TIED:
        # Both uses of the table are in it: the lookup reaches only rows that occur, the head all of them.
        (rows,) = np.nonzero(factors[TIED[name]].per_sample().numpy()[0].any(axis=1))
        assert len(rows) == VOCABULARY


def test_padding_types_and_masks_of_ernie():
    model = randomise(MODELS["ernie"]())
    ids = token_ids()
    ids[1, 4:] = 0
    types = paddle.to_tensor(np.random.default_rng(2).integers(0, 3, [B, STEPS]))
    positions = paddle.arange(STEPS).unsqueeze(0)
    run = loss_of(lambda m, ids, types: m(ids, token_type_ids=types, position_ids=positions))
    assert_parity(model, run, [ids, types])


def test_bart_shares_its_positions_and_its_table():
    config = T.BartConfig(
        vocab_size=VOCABULARY,
        d_model=8,
        num_encoder_layers=1,
        num_decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=16,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    )
    model = randomise(T.BartForConditionalGeneration(config))
    with pytest.warns(UserWarning, match="has to be differentiated sample by sample"):
        assert_parity(model, loss_of(lambda m, ids: m(ids)), [token_ids()])


def test_t5_shares_its_relative_positions():
    config = T.T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0)
    model = randomise(T.T5ForConditionalGeneration(config))
    with pytest.warns(UserWarning, match="relative_attention_bias.weight.*has to be differentiated sample by sample"):
        # Its norms compute in float32.
        assert_parity(model, loss_of(lambda m, ids: m(ids, decoder_input_ids=ids)), [token_ids()], rtol=1e-5)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral"])
def test_decoders_with_rms_norm(kind):
    extra = {} if kind == "Llama" else {"num_key_value_heads": 2}
    model = randomise(getattr(T, f"{kind}ForCausalLM")(getattr(T, f"{kind}Config")(**LLAMA, **extra)))
    # These models compute norms and logits in float32 whatever their parameters are.
    assert_parity(model, loss_of(lambda m, ids: m(ids)), [token_ids()], rtol=1e-5)


def with_adapter(model: nn.Layer, seed: int = 0) -> nn.Layer:
    model.train()
    for p in model.parameters():
        if not p.stop_gradient:
            p.set_value(p.numpy() + 0.3 * np.random.default_rng(seed).standard_normal(p.shape))
    return model


LORA = {
    "plain": {},
    "quick": {"use_quick_lora": True},
    "rank-stabilised": {"rslora": True},
    "with-bias": {"trainable_bias": "lora"},
    "all-biases": {"trainable_bias": "all"},
    "mixer": {"lora_use_mixer": True},
    "mora": {"use_mora": True},
    "not-merged": {"merge_weights": False},
}


@pytest.mark.parametrize("name", LORA)
def test_lora_ernie(name):
    config = LoRAConfig(target_modules=[".*q_proj.*", ".*v_proj.*"], r=2, lora_alpha=4, dtype="float64", **LORA[name])
    model = LoRAModel(MODELS["ernie"](), config)
    model.mark_only_lora_as_trainable()
    factors = assert_parity(with_adapter(model), loss_of(lambda m, ids: m(ids)), [token_ids()])
    assert len(factors) == sum(not p.stop_gradient for p in model.parameters())


def test_vera_prefix_and_bias_only():
    model = VeRAModel(MODELS["ernie"](), VeRAConfig(target_modules=[".*q_proj.*"], r=2, dtype="float64"))
    model.mark_only_vera_as_trainable()
    assert_parity(with_adapter(model), loss_of(lambda m, ids: m(ids)), [token_ids()])

    config = PrefixConfig(
        num_prefix_tokens=3, num_attention_heads=2, num_hidden_layers=2, hidden_size=8, dtype="float64"
    )
    llama = T.LlamaForCausalLM(T.LlamaConfig(**LLAMA))
    model = PrefixModelForCausalLM(llama, config, postprocess_past_key_value=llama_postprocess_past_key_value)
    model.mark_only_prefix_as_trainable()
    run = loss_of(lambda m, ids: m(ids, attention_mask=paddle.ones_like(ids)))
    factors = assert_parity(with_adapter(model), run, [token_ids()], rtol=1e-5)
    assert set(factors) == {"prefix_encoder.0.weight"}

    model = randomise(MODELS["ernie"]())
    for name, p in model.named_parameters():
        p.stop_gradient = not name.endswith("bias")
    factors = assert_parity(model, loss_of(lambda m, ids: m(ids)), [token_ids()])
    assert all(name.endswith("bias") for name in factors)


def test_last_layers_only():
    model = randomise(MODELS["ernie"]())
    for name, p in model.named_parameters():
        p.stop_gradient = not ("classifier" in name or "encoder.layers.1" in name)
    assert_parity(model, loss_of(lambda m, ids: m(ids)), [token_ids()])


# Models of paddle.nn alone.


def floats(*shape: int, seed: int = 1):
    return tensor(np.random.default_rng(seed).standard_normal([B, *shape]), "float64")


def test_multi_head_attention():
    class Model(nn.Layer):
        def __init__(self, **options):
            super().__init__()
            self.embed = nn.Linear(8, 8)
            self.attend = nn.MultiHeadAttention(8, 2, **options)

        def forward(self, x, key, value, mask=None):
            return self.attend(self.embed(x), key, value, attn_mask=mask)

    x, key, value = floats(5, 8), floats(4, 6, seed=2), floats(4, 7, seed=3)
    mask = paddle.to_tensor(np.random.default_rng(4).integers(0, 2, [B, 1, 5, 4]).astype(bool))
    mask[:, :, :, 0] = True
    model = randomise(Model(kdim=6, vdim=7))
    assert_parity(model, loss_of(lambda m, *i: m(*i)), [x, key, value])
    assert_parity(model, loss_of(lambda m, *i: m(*i)), [x, key, value, mask])


def test_attention_with_a_cache():
    class Steps(nn.Layer):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(8, 8)
            self.attend = nn.MultiHeadAttention(8, 2)

        def forward(self, x):
            x = self.embed(x)
            cache = self.attend.gen_cache(x)
            outputs = []
            for t in range(x.shape[1]):
                out, cache = self.attend(x[:, t : t + 1], x[:, t : t + 1], x[:, t : t + 1], None, cache)
                outputs.append(out)
            return paddle.concat(outputs, axis=1)

    assert_parity(randomise(Steps()), loss_of(lambda m, x: m(x)), [floats(4, 8)])


def test_transformer():
    model = randomise(nn.Transformer(8, 2, 1, 1, 16, dropout=0.0))
    assert_parity(model, loss_of(lambda m, *i: m(*i)), [floats(5, 8), floats(4, 8, seed=2)])


class Block(nn.Layer):
    def __init__(self, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2D(channels, 8, 3, stride=stride, padding=1, bias_attr=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)
        self.conv2 = nn.Conv2D(8, 8, 3, padding=1, bias_attr=False)
        self.shortcut = nn.Conv2D(channels, 8, 1, stride=stride, bias_attr=False)

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu_(y + self.shortcut(x))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_resnet_with_group_norm(reduction):
    model = nn.Sequential(Block(3, 1), Block(8, 2), nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(8, 4))
    assert_parity(randomise(model), loss_of(lambda m, x: m(x)), [floats(3, 8, 8)], reduction=reduction)


def test_vision_transformer_of_paddle_vision_style():
    class ViT(nn.Layer):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2D(3, 8, 4, stride=4)
            self.cls_token = self.create_parameter([1, 1, 8])
            self.pos_embed = self.create_parameter([1, 5, 8])
            self.gamma = self.create_parameter([8])
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 2)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose([0, 2, 1])
            x = paddle.concat([self.cls_token.expand([x.shape[0], -1, -1]), x], axis=1) + self.pos_embed
            return self.head(self.encoder(x)[:, 0] * self.gamma)

    assert_parity(randomise(ViT()), loss_of(lambda m, x: m(x)), [floats(3, 8, 8)], reduction="mean")


def test_lstm_classifier_with_padding():
    class Classifier(nn.Layer):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 8, padding_idx=0)
            self.lstm = nn.LSTM(8, 6, num_layers=2, direction="bidirect")
            self.head = nn.Linear(12, 3)

        def forward(self, ids, lengths):
            out, _ = self.lstm(self.embed(ids), sequence_length=lengths)
            return self.head(out.sum(axis=1) / lengths.unsqueeze(1).astype(out.dtype))

    ids, lengths = token_ids(), paddle.to_tensor([6, 3, 4])
    ids[1, 3:], ids[2, 4:] = 0, 0
    model = randomise(built(Classifier, "float64"))
    assert_parity(model, loss_of(lambda m, *i: m(*i)), [ids, lengths], reduction="mean")
