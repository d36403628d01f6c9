"""Which parameters are trained, and through which head the model classifies.

`full` trains everything; `lora` low-rank updates of the query and value projections (Hu et al. 2022); `bitfit` the bias
terms (Ben Zaken et al. 2022); `head` the pooler and classifier alone; `probe` a new network of two layers that sees
what every frozen layer makes of the text; `prompt` puts "很[MASK]。" before the text and
compares the masked-language-model's scores of one word per class (Schick and Schütze 2021). `--freeze-layers K` leaves
the embeddings and the first K encoder layers out, with any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ernie
import network
from arguments import HEADS

LORA_RANK = 8
PROBE_UNITS = 384
MASK = "[MASK]"


@dataclass(frozen=True)
class Prompt:
    """What is put before each text, and the word that stands for each class."""

    before: list[int]
    """Token ids between [CLS] and the text, [MASK] among them."""
    position: int
    """Of [MASK] in the whole row."""
    words: list[int]
    """One token id per class, in the order of the labels."""


def read_prompt(tokenizer: Any, template: str, words: list[str] | None, labels: list[str]) -> Prompt:
    """
    Raises:
        ernie.ModelError: the template has not one [MASK], or the words are not one token per label.
    """
    if template.count(MASK) != 1:
        raise ernie.ModelError(f"--prompt {template!r}: must contain {MASK} exactly once")
    if words is None:
        words = ["差", "好"] if labels == ["0", "1"] else labels
    if len(words) != len(labels):
        raise ernie.ModelError(f"--label-words: {words} are {len(words)} words for the {len(labels)} labels {labels}")
    ids = []
    for word in words:
        pieces = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(word))
        if len(pieces) != 1 or pieces[0] == tokenizer.unk_token_id:
            raise ernie.ModelError(
                f"--label-words: {word!r} is not one token of this model; pass such a word per label"
            )
        ids.append(int(pieces[0]))
    start, end = (tokenizer.convert_tokens_to_ids(tokenizer.tokenize(part)) for part in template.split(MASK))
    return Prompt([*start, tokenizer.mask_token_id, *end], 1 + len(start), ids)


def frozen_layers(model: Any, strategy: str, asked: int | None) -> int | None:
    """How many encoder layers are run once and for all: all of them under a strategy that trains a head alone."""
    return len(model.base_model.encoder.layers) if strategy in HEADS else asked


def choose_parameters(model: Any, strategy: str, frozen: int | None) -> None:
    """Marks what is trained; `lora` also puts its factors into ``model``.

    Raises:
        ernie.ModelError: the model has fewer layers than are to be frozen, or is not built as the strategy needs.
    """
    if strategy == "lora":
        _add_lora(model, frozen or 0)
    ernie.freeze_layers(model, frozen)
    base = model.base_model
    if strategy == "head":
        _freeze(base)
        _train(base.pooler)
    elif strategy == "probe":
        _freeze(model)
    elif strategy == "bitfit":
        for name, parameter in base.named_parameters():
            if not name.endswith("bias") and not name.startswith("pooler"):
                parameter.stop_gradient = True
    elif strategy == "lora":
        for name, parameter in base.named_parameters():
            if "lora_" not in name:
                parameter.stop_gradient = True
        # PaddleNLP freezes everything else.
        _train(base.pooler)
        _train(model.classifier)
    elif strategy == "prompt":
        # Tied to the output words, whose scores must not move with the inputs.
        _freeze(base.embeddings.word_embeddings)
        _freeze(base.pooler)
        output = model.get_output_embeddings()
        output.bias.stop_gradient = True


def build_network(model: Any, strategy: str, prompt: Prompt | None, frozen: int | None) -> Any:
    """What maps a batch's inputs to scores: from tokens, or from the output of the frozen layers.

    Raises:
        ernie.ModelError: layers are frozen in a model whose parts are not where ERNIE has them.
    """
    start = frozen or 0
    position = network.FIRST if prompt is None else prompt.position
    if prompt is None and not _is_like_ernie(model):
        if start:
            raise ernie.ModelError(
                f"--freeze-layers: {type(model).__name__} is not built like ERNIE (embeddings, post-norm encoder, "
                "pooler, classifier); leave it out"
            )
        return model
    head: Any
    if strategy == "probe":
        width = network.features_width(model)
        head = network.Probe(width, PROBE_UNITS, model.config.num_labels)
    else:
        head = network.PoolerHead(model) if prompt is None else network.WordHead(model, prompt.words)
    return network.Upper(model, head, start, position) if start else network.Whole(model, head, position)


def _is_like_ernie(model: Any) -> bool:
    from paddle import nn

    base = model.base_model
    layers = getattr(getattr(base, "encoder", None), "layers", [])
    return (
        all(hasattr(base, part) for part in ("embeddings", "pooler"))
        and all(hasattr(model, part) for part in ("dropout", "classifier"))
        and len(layers) > 0
        and all(isinstance(layer, nn.TransformerEncoderLayer) and not layer.normalize_before for layer in layers)
    )


def plain_model(model: Any) -> Any:
    """The model as PaddleNLP saves it: low-rank updates are added to the weights they belong to."""
    state = model.state_dict()
    factors = {name[: -len(".lora_A")] for name in state if name.endswith(".lora_A")}
    if not factors:
        return model
    from paddlenlp.peft.lora.lora_layers import LoRALinear

    scaling = {name: layer.scaling for name, layer in model.named_sublayers() if isinstance(layer, LoRALinear)}
    plain = type(model)(model.config)
    merged = {name: value for name, value in state.items() if ".lora_" not in name}
    for name in factors:
        update = state[f"{name}.lora_A"] @ state[f"{name}.lora_B"]
        merged[f"{name}.weight"] = state[f"{name}.weight"] + update * scaling[name]
    plain.set_state_dict(merged)
    return plain


def _add_lora(model: Any, frozen_layers: int) -> None:
    with ernie.quiet_import():
        from paddlenlp.peft import LoRAConfig, LoRAModel
    layers = range(frozen_layers, len(model.base_model.encoder.layers))
    targets = [rf".*encoder\.layers\.{layer}\.self_attn\.{part}_proj" for layer in layers for part in "qv"]
    if not targets:
        raise ernie.ModelError(f"--freeze-layers {frozen_layers} leaves lora nothing to train; use --strategy head")
    # The factors are put into `model`; the wrapper that comes back is not needed.
    LoRAModel(model, LoRAConfig(target_modules=targets, r=LORA_RANK, lora_alpha=2 * LORA_RANK))


def _freeze(layer: Any) -> None:
    for parameter in layer.parameters():
        parameter.stop_gradient = True


def _train(layer: Any) -> None:
    for parameter in layer.parameters():
        parameter.stop_gradient = False
