"""Labelled images as arrays: Fashion-MNIST's files, or scikit-learn's digits. No deep-learning framework is needed."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Where Debian's package dataset-fashion-mnist puts the files.
DEBIAN = Path("/usr/share/datasets/fashion-mnist")

Split = tuple[Any, Any]


class DataError(Exception):
    """The data cannot be read; the message says what to do."""


@dataclass(frozen=True)
class Images:
    """Images float32 ``[rows, 1, size, size]`` in [-1, 1] with labels int64 ``[rows]`` of 0…9."""

    train: Split
    dev: Split
    test: Split

    @property
    def size(self) -> int:
        return self.train[0].shape[-1]


def load(data: str | None) -> Images:
    """``data``: a folder with the four ``idx-ubyte.gz`` files, ``"digits"``, or None for Debian's Fashion-MNIST."""
    if data == "digits":
        return _digits()
    folder = DEBIAN if data is None else Path(data)
    images, labels = _read(folder, "train")
    # The last rows, always the same, are for choosing the flags; nothing is ever trained on them.
    kept = len(images) - len(images) // 12
    return Images((images[:kept], labels[:kept]), (images[kept:], labels[kept:]), _read(folder, "t10k"))


def _read(folder: Path, name: str) -> Split:
    pixels, labels = _idx(folder / f"{name}-images-idx3-ubyte.gz", 3), _idx(folder / f"{name}-labels-idx1-ubyte.gz", 1)
    if len(pixels) != len(labels):
        raise DataError(f"{folder}: {len(pixels)} images but {len(labels)} labels in the files of '{name}'")
    return _scaled(pixels, 255), labels.astype("int64")


def _idx(path: Path, dimensions: int) -> Any:
    """The IDX format: two zero bytes, 8 for unsigned bytes, the number of dimensions, their sizes, the bytes."""
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; install Debian's package dataset-fashion-mnist, pass --data FOLDER with the "
            "four idx-ubyte.gz files, or --data digits"
        )
    with gzip.open(path) as file:
        content = file.read()
    start = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(content[4:start], ">u4"))
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) != start + np.prod(shape):
        raise DataError(f"{path}: not an IDX file of unsigned bytes in {dimensions} dimensions")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("--data digits reads scikit-learn's: pip install scikit-learn") from None
    pixels, labels = load_digits(return_X_y=True)
    # The file is ordered by writer; this order is fixed, and has nothing to do with the values.
    order = np.random.RandomState(0).permutation(len(pixels))
    images, labels = _scaled(pixels[order].reshape(-1, 8, 8), 16), labels[order].astype("int64")
    return Images(*((images[part], labels[part]) for part in (slice(1297), slice(1297, 1497), slice(1497, None))))


def _scaled(pixels: Any, largest: int) -> Any:
    # By the format's range, not by the data's mean: a statistic of the training rows would itself cost ε.
    return (pixels[:, None].astype("float32") * (2 / largest) - 1).astype("float32")


def views(pixels: Any, count: int, mirror: bool, random: np.random.Generator) -> Iterator[Any]:
    """The images ``[rows, 1, size, size]``, then ``count - 1`` times with each moved by up to a pixel either way.

    What moves in from outside is background.

    Args:
        mirror: also turn each left to right, with probability 1/2.
    """
    yield pixels
    if count == 1:
        return
    rows, size = len(pixels), pixels.shape[-1]
    padded = np.pad(pixels[:, 0], ((0, 0), (1, 1), (1, 1)), constant_values=-1.0)
    for _ in range(count - 1):
        down, across = (random.integers(0, 3, (rows, 1)) + np.arange(size) for _ in range(2))
        if mirror:
            across = np.where(random.random((rows, 1)) < 0.5, across[:, ::-1], across)
        yield padded[np.arange(rows)[:, None, None], down[:, :, None], across[:, None, :]][:, None]
