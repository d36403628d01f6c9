"""From the flags to what is trained: rows, and the network that sees them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clip_norm
import ernie
import numpy as np
import reviews
from batches import EncodedRows, Join, pad_tokens, stack_features
from head_only import Head, first_token_states


@dataclass(frozen=True)
class Task:
    model: Any
    """The whole model, which is saved."""
    tokenizer: Any
    network: Any
    """What maps a batch of inputs to scores ``[B, classes]``: the model, or its head on features computed once."""
    join: Join
    train: EncodedRows
    dev: EncodedRows
    test: EncodedRows
    unseen: list[bool]
    """Which test rows stand nowhere in the training file, duplicates and dropped rows included."""
    clip_norm: float | None

    @property
    def trained_parameters(self) -> list[Any]:
        return [parameter for parameter in self.network.parameters() if not parameter.stop_gradient]


def prepare(args: argparse.Namespace, model_folder: Path) -> Task:
    """Reads the data, builds the model and encodes the rows.

    Raises:
        reviews.DataError, ernie.ModelError: a file is missing or malformed.
    """
    import paddle

    data = reviews.load(args.data)
    train_rows = _training_rows(data.train, args.keep_duplicates)
    paddle.seed(args.seed)
    model, tokenizer = ernie.load(args.model, len(data.labels), args.dropout, model_folder)
    ernie.freeze_layers(model, args.freeze_layers)
    head_only = args.freeze_layers == len(model.base_model.encoder.layers)
    network: Any = Head(model) if head_only else model
    join = stack_features if head_only else pad_tokens(tokenizer.pad_token_id)

    def encode(rows: list[reviews.Row]) -> EncodedRows:
        tokens = ernie.encode(tokenizer, [text for text, _ in rows], args.max_length)
        encoded = EncodedRows(tokens, [label for _, label in rows])
        return first_token_states(model, encoded, tokenizer.pad_token_id) if head_only else encoded

    train = encode(train_rows)
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
