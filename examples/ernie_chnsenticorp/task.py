"""From the flags to what is trained: rows, and the network that sees them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clip_norm
import ernie
import numpy as np
import reviews
import strategies
from batches import EncodedRows, Join, pad_states, pad_tokens, shortest_first
from network import FIRST, frozen_states, layer_features
from state_cache import cached_states


@dataclass(frozen=True)
class Task:
    model: Any
    """The whole model, which is saved."""
    tokenizer: Any
    network: Any
    """Maps a batch of inputs to scores ``[B, classes]``: the model, or what of it comes after its frozen layers."""
    join: Join
    train: EncodedRows
    dev: EncodedRows
    test: EncodedRows
    unseen: list[bool]
    """Which test rows stand nowhere in the training file, duplicates and dropped rows included."""
    clip_norm: float | None
    prompt: strategies.Prompt | None
    encode: Callable[[list[reviews.Row]], EncodedRows]
    """What rows become before they are batched: token ids, or the output of the frozen layers."""

    def parameter_groups(self, encoder_scale: float) -> list[Any]:
        """The trained parameters as Paddle's optimizers take them: the encoder's at a scaled learning rate."""
        if encoder_scale == 1.0:
            return self.trained_parameters
        base = self.model.base_model
        encoder = {id(p) for part in (base.embeddings, base.encoder) for p in part.parameters()}
        parts = [[p for p in self.trained_parameters if (id(p) in encoder) is inside] for inside in (False, True)]
        groups = [{"params": part, "learning_rate": scale} for part, scale in zip(parts, (1.0, encoder_scale))]
        return [group for group in groups if group["params"]]

    @property
    def trained_parameters(self) -> list[Any]:
        return [parameter for parameter in self.network.parameters() if not parameter.stop_gradient]


def prepare(args: argparse.Namespace, model_folder: Path, data: reviews.Reviews) -> Task:
    """Builds the model and encodes the rows.

    Raises:
        reviews.DataError, ernie.ModelError: a file is missing or malformed.
    """
    import paddle

    train_rows = _training_rows(data.train, args.keep_duplicates)
    paddle.seed(args.seed)
    prompted = args.strategy == "prompt"
    model, tokenizer = ernie.load(args.model, len(data.labels), args.dropout, model_folder, masked_lm=prompted)
    model.config.id2label = dict(enumerate(data.labels))
    model.config.label2id = {label: number for number, label in enumerate(data.labels)}
    prompt = strategies.read_prompt(tokenizer, args.prompt, args.label_words, data.labels) if prompted else None
    frozen = strategies.frozen_layers(model, args.strategy, args.freeze_layers)
    strategies.choose_parameters(model, args.strategy, frozen)
    network = strategies.build_network(model, args.strategy, prompt, frozen)
    join = pad_states if frozen else pad_tokens(tokenizer.pad_token_id)

    def encode(rows: list[reviews.Row]) -> EncodedRows:
        before = prompt.before if prompt else ()
        tokens = ernie.encode(tokenizer, [text for text, _ in rows], args.max_length, before)
        encoded = EncodedRows(tokens, [label for _, label in rows])
        if not frozen:
            return encoded
        position = prompt.position if prompt else FIRST

        def compute() -> EncodedRows:
            if args.strategy == "probe":
                return layer_features(model, encoded, tokenizer.pad_token_id)
            return frozen_states(model, encoded, tokenizer.pad_token_id, frozen, position)

        if args.state_cache is None:
            return compute()
        what = "features" if args.strategy == "probe" else str(position)
        return cached_states(args.state_cache, model, encoded, frozen, what, compute)

    train = shortest_first(encode(train_rows))
    bound = args.clip_norm
    if bound == "auto":
        if args.clip_norm_data is None:
            bound = _automatic_clip_norm(network, _some(train, args.seed), join, data.public)
        else:
            public = reviews.load(args.clip_norm_data).train
            bound = _automatic_clip_norm(network, encode(_some_of(public, args.seed)), join, public=True)
    return Task(
        model=model,
        tokenizer=tokenizer,
        network=network,
        join=join,
        train=train,
        dev=encode(data.dev),
        test=encode(data.test),
        unseen=reviews.unseen_mask(data.test, data.train),
        clip_norm=bound,
        prompt=prompt,
        encode=encode,
    )


def _training_rows(train: list[reviews.Row], keep_duplicates: bool) -> list[reviews.Row]:
    if keep_duplicates:
        copies = reviews.most_copies(train)
        if copies > 1:
            print(
                f"training rows: {len(train)}, with duplicates; the commonest text stands {copies} times, and ε "
                f"protects one of these rows, not the text: for it the bound is about {copies} times ε"
            )
        return train
    found = reviews.deduplicate(train)
    print(
        f"training rows: {len(found.rows)} of {len(train)}; dropped {found.repeats} repeats of a text and all "
        f"{found.conflicting_rows} rows of {found.conflicting_texts} texts that carry more than one label"
    )
    return found.rows


def _automatic_clip_norm(network: Any, rows: EncodedRows, join: Join, public: bool) -> float:
    value = clip_norm.percentile_clip_norm(network, rows, join)
    print(f"clip norm: {value:.4g}, the {clip_norm.PERCENTILE}th percentile of {len(rows)} gradient norms")
    if not public:
        print(
            "warning: this clip norm was read off the private training rows, and ε does not cover that peek; pass "
            "public rows of the same kind with --clip-norm-data, or a number"
        )
    return value


def _chosen(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(count)[: clip_norm.ROWS].tolist()


def _some(rows: EncodedRows, seed: int) -> EncodedRows:
    chosen = _chosen(len(rows), seed)
    return EncodedRows([rows.inputs[row] for row in chosen], [rows.labels[row] for row in chosen])


def _some_of(rows: list[reviews.Row], seed: int) -> list[reviews.Row]:
    return [rows[row] for row in _chosen(len(rows), seed)]
