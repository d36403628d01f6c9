"""Training rows as Paddle batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ernie import pad
from paddle.io import Dataset


class EncodedRows(Dataset):
    """Rows of (token ids int64 ``[T]``, label)."""

    def __init__(self, ids: Sequence[np.ndarray[Any, Any]], labels: Sequence[int]) -> None:
        super().__init__()
        self.ids = ids
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[np.ndarray[Any, Any], int]:
        return self.ids[row], self.labels[row]


def collate(pad_id: int) -> Callable[[list[tuple[np.ndarray[Any, Any], int]]], tuple[Any, Any]]:
    """A ``collate_fn`` that pads to the longest row of the batch: ids ``[B, T]``, labels ``[B]``, both int64."""

    def join(rows: list[tuple[np.ndarray[Any, Any], int]]) -> tuple[Any, Any]:
        return pad([ids for ids, _ in rows], pad_id), np.array([label for _, label in rows], dtype=np.int64)

    return join
