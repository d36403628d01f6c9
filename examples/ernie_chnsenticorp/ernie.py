"""The model and its tokenizer: an ERNIE from PaddleNLP, or `tiny`, a small one that needs no download."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TINY_POSITIONS = 128
TINY_HIDDEN = 16
TINY_CHARACTER_SCALE = 0.02


class ModelError(Exception):
    """The model cannot be built or loaded; the message says which file is missing and what to pass."""


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Importing Paddle and PaddleNLP warns about a missing ccache and deprecated packages; none concerns the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tiny_vocabulary() -> list[str]:
    """Special tokens, ASCII, Chinese punctuation and the 3,755 commonest characters (level 1 of GB 2312).

    A vocabulary collected from the training rows would tell who is in them; this one is the same for every data set.
    """
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    ascii_tokens = [chr(code) for code in range(0x21, 0x7F) if not chr(code).isupper()]
    suffixes = [f"##{token}" for token in ascii_tokens if token.isalnum()]
    punctuation = list("，。！？、；：（）《》“”‘’…—～")
    rows = ((row, 0xF9 if row == 0xD7 else 0xFE) for row in range(0xB0, 0xD8))
    characters = [bytes([row, cell]).decode("gb2312") for row, last in rows for cell in range(0xA1, last + 1)]
    return special + ascii_tokens + suffixes + punctuation + characters


def build_tiny(num_classes: int, dropout: float, folder: Path, masked_lm: bool = False) -> tuple[Any, Any]:
    """An untrained `ErnieForSequenceClassification` (or `ErnieForMaskedLM`) of one layer, and its character tokenizer.

    The vocabulary is written to ``folder``, where the tokenizer keeps reading it.
    """
    with quiet_import():
        from paddlenlp.transformers import ErnieConfig, ErnieForMaskedLM, ErnieForSequenceClassification, ErnieTokenizer
    _quiet_log()
    vocabulary = tiny_vocabulary()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "vocab.txt"
    path.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    tokenizer = ErnieTokenizer(str(path))
    config = ErnieConfig(
        vocab_size=len(vocabulary),
        hidden_size=TINY_HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=TINY_HIDDEN,
        hidden_act="relu",
        max_position_embeddings=TINY_POSITIONS,
        type_vocab_size=0,
        initializer_range=0.125,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=0,
        num_labels=num_classes,
    )
    model = (ErnieForMaskedLM if masked_lm else ErnieForSequenceClassification)(config)
    _initialise_tiny_embeddings(model.ernie.embeddings, tokenizer)
    return model, tokenizer


def _initialise_tiny_embeddings(embeddings: Any, tokenizer: Any) -> None:
    """Starting values under which a clipped gradient is about the characters of a review.

    A row's gradient has one unit of norm to share out. Layer normalisation divides the gradient of an embedding by its
    length, so the characters start short; [CLS] and [SEP], which all rows share and whose gradient would otherwise
    be the largest of all, start long. Positions are fixed sinusoids (Vaswani et al. 2017) for the same reason.
    """
    import paddle

    words = paddle.randn(embeddings.word_embeddings.weight.shape) * TINY_CHARACTER_SCALE
    for token in (tokenizer.cls_token_id, tokenizer.sep_token_id):
        words[token] = paddle.randn([TINY_HIDDEN])
    words[tokenizer.pad_token_id] = 0.0
    embeddings.word_embeddings.weight.set_value(words)

    place = np.arange(TINY_POSITIONS)[:, None]
    column = np.arange(TINY_HIDDEN)[None, :]
    angle = place / 10_000 ** (2 * (column // 2) / TINY_HIDDEN)
    waves = TINY_CHARACTER_SCALE * np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
    embeddings.position_embeddings.weight.set_value(waves.astype(np.float32))
    embeddings.position_embeddings.weight.stop_gradient = True


def _quiet_log() -> None:
    """PaddleNLP reports every file it reads and writes; only its warnings matter here."""
    from paddlenlp.utils.log import logger

    logger.set_level("WARNING")


def load(name: str, num_classes: int, dropout: float, folder: Path, masked_lm: bool = False) -> tuple[Any, Any]:
    """Model and tokenizer called ``name``: ``tiny``, a local directory, or a name PaddleNLP can download.

    ``folder`` is where the model will be saved. ``masked_lm`` asks for the head that predicts words, with which the
    weights were pretrained, in place of a new classifier.

    Raises:
        ModelError: a file is missing or the hub cannot be reached.
    """
    if name == "tiny":
        return build_tiny(num_classes, dropout, folder, masked_lm)
    if Path(name).is_dir():
        _require_files(Path(name))
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"--model {name}: no such directory")
    with quiet_import():
        from paddlenlp.transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer
    _quiet_log()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        if masked_lm:
            model = AutoModelForMaskedLM.from_pretrained(name, **dropouts)
        else:
            model = AutoModelForSequenceClassification.from_pretrained(name, num_classes=num_classes, **dropouts)
    except Exception as error:
        raise ModelError(
            f"--model {name}: PaddleNLP could not load it ({error}). Without a network, copy config.json, vocab.txt "
            "and model_state.pdparams (or model.safetensors) of the model into a directory and pass that: --model DIR"
        ) from error
    if masked_lm:
        _require_word_head(name, model, AutoModelForMaskedLM.from_pretrained(name))
    return model, tokenizer


def _require_word_head(name: str, model: Any, again: Any) -> None:
    """PaddleNLP starts what a checkpoint lacks at random, so of two loads only what the checkpoint holds is equal."""
    heads = [getattr(getattr(m, "cls", None), "predictions", None) for m in (model, again)]
    if any(not hasattr(head, part) for head in heads for part in ("transform", "layer_norm", "activation")):
        raise ModelError(f"--model {name}: {type(model).__name__} has no head that prompt knows; use another strategy")
    first, second = (head.transform.weight.numpy() for head in heads)
    if not np.array_equal(first, second):
        raise ModelError(
            f"--model {name}: the weights hold no masked-language-model head (cls.predictions.*), which --strategy "
            "prompt needs; use another strategy, or a checkpoint from pretraining"
        )


def _require_files(folder: Path) -> None:
    wanted = (("config.json", "model_config.json"), ("vocab.txt",), ("model_state.pdparams", "model.safetensors"))
    for names in wanted:
        if not any((folder / name).is_file() for name in names):
            raise ModelError(f"--model {folder}: {' or '.join(names)} is missing from this directory")


def freeze_layers(model: Any, layers: int | None) -> None:
    """Exclude the embeddings and the first ``layers`` encoder layers from training; None trains everything.

    Raises:
        ModelError: the model has fewer layers.
    """
    if layers is None:
        return
    encoder = model.base_model.encoder.layers
    if layers > len(encoder):
        raise ModelError(f"--freeze-layers {layers}: the model has {len(encoder)} encoder layers")
    for part in (model.base_model.embeddings, *encoder[:layers]):
        for parameter in part.parameters():
            parameter.stop_gradient = True


def encode(
    tokenizer: Any, texts: Sequence[str], max_length: int, before: Sequence[int] = ()
) -> list[np.ndarray[Any, Any]]:
    """Token ids of each text, int64 ``[T]`` with ``T <= max_length``: [CLS], ``before``, the text, [SEP]."""
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    encoded = []
    for text in texts:
        # A token is a character or more, and a longer prefix cannot change the first tokens.
        pieces = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text[: 8 * max_length]))
        kept = pieces[: max_length - 2 - len(before)]
        encoded.append(np.array([first, *before, *kept, last], dtype=np.int64))
    return encoded
