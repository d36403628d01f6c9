"""Rows as Paddle batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from paddle.io import BatchSampler, Dataset

Row = tuple[Any, int]
Join = Callable[[Sequence[Row]], Any]
"""Makes a batch, a pair: the network's arguments, the rows along their first axes, and labels int64 ``[B]``."""


class EncodedRows(Dataset):
    """Rows of (input, label); an input is token ids int64 ``[T]``, or states of an encoder float32 ``[T, d]``."""

    def __init__(self, inputs: Sequence[np.ndarray[Any, Any]], labels: Sequence[int]) -> None:
        super().__init__()
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Row:
        return self.inputs[row], self.labels[row]


def pad_tokens(pad_id: int) -> Join:
    """Pads to the longest row of the batch: ids ``[B, T]`` alone."""

    def join(rows: Sequence[Row]) -> tuple[Any, Any]:
        batch = np.full((len(rows), max(len(ids) for ids, _ in rows)), pad_id, dtype=np.int64)
        for padded, (ids, _) in zip(batch, rows):
            padded[: len(ids)] = ids
        return (batch,), _labels(rows)

    return join


def pad_states(rows: Sequence[Row]) -> tuple[Any, Any]:
    """Pads to the longest row of the batch: states ``[B, T, d]`` and their numbers of tokens int64 ``[B]``."""
    lengths = np.array([len(states) for states, _ in rows], dtype=np.int64)
    batch = np.zeros((len(rows), lengths.max(), rows[0][0].shape[1]), dtype=np.float32)
    for padded, (states, _) in zip(batch, rows):
        padded[: len(states)] = states
    return (batch, lengths), _labels(rows)


def shortest_first(rows: EncodedRows) -> EncodedRows:
    """The same rows in order of length: pieces of a batch, which keep the rows' order, then hold little padding."""
    order = sorted(range(len(rows)), key=lambda row: len(rows.inputs[row]))
    return EncodedRows([rows.inputs[row] for row in order], [rows.labels[row] for row in order])


class ShuffledByLength(BatchSampler):
    """Every row once an epoch in random batches of ``batch_size`` rows of similar length, for training without privacy.

    The rows are shuffled, sorted by length within pools of many batches, and the batches shuffled.
    """

    POOL = 16

    def __init__(self, rows: EncodedRows, batch_size: int, seed: int) -> None:
        self._lengths = np.array([len(row) for row in rows.inputs])
        self._random = np.random.default_rng(seed)
        super().__init__(rows, batch_size=batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._random.permutation(len(self._lengths))
        pool = self.POOL * self.batch_size
        batches = []
        for start in range(0, len(order), pool):
            chosen = order[start : start + pool]
            chosen = chosen[np.argsort(self._lengths[chosen], kind="stable")]
            batches += [
                chosen[first : first + self.batch_size].tolist() for first in range(0, len(chosen), self.batch_size)
            ]
        for batch in self._random.permutation(len(batches)):
            yield batches[batch]


def by_length(rows: EncodedRows, size: int) -> list[list[int]]:
    """Row numbers in groups of ``size``, rows of similar length together, so that little of a batch is padding."""
    order = sorted(range(len(rows)), key=lambda row: len(rows.inputs[row]))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _labels(rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    return np.array([label for _, label in rows], dtype=np.int64)
