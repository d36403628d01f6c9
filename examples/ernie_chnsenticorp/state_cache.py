"""`--state-cache`: what frozen layers made of the rows, kept in files for the next run on the same rows.

The files hold the rows as the frozen layers see them, and need the protection that the rows need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from batches import EncodedRows


def cached_states(
    folder: Path, model: Any, rows: EncodedRows, layers: int, what: str, compute: Callable[[], EncodedRows]
) -> EncodedRows:
    """``compute()``, or what it returned for the same frozen weights and rows before; mapped from the file.

    Args:
        layers: how many encoder layers are frozen.
        what: names what ``compute`` makes of them.
    """
    name = _digest(model, rows, layers, what)
    path, lengths_path = folder / f"{name}.npy", folder / f"{name}-lengths.npy"
    if not lengths_path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        states = compute().inputs
        np.save(path, np.concatenate(states))
        # Written last: its existence says that the other is whole.
        np.save(lengths_path, np.array([len(s) for s in states]))
    ends = np.cumsum(np.load(lengths_path))
    joined = np.load(path, mmap_mode="r")
    return EncodedRows([joined[start:end] for start, end in zip(np.r_[0, ends[:-1]], ends)], rows.labels)


def _digest(model: Any, rows: EncodedRows, layers: int, what: str) -> str:
    digest = hashlib.sha256(f"{layers} {what}".encode())
    for part in (model.base_model.embeddings, *list(model.base_model.encoder.layers)[:layers]):
        for name, parameter in part.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.numpy().tobytes())
    for ids in rows.inputs:
        digest.update(len(ids).to_bytes(4, "little"))
        digest.update(ids.tobytes())
    return digest.hexdigest()[:32]
