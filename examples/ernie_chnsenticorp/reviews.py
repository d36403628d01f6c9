"""Rows of a sentiment data set: reading, and removing duplicates in a way that the privacy unit survives.

Duplicates matter: a text that stands k times in the training set is protected k times less. So every text is kept
once, and a text that occurs with two labels is dropped whole. Under this rule one row of the file more or less
changes the training set by one row at most, whatever the other rows are. Keeping the majority's label, or the
first, would not do: one row could then turn the label of another.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mini_corpus

Row = tuple[str, int]
SPLITS = ("train", "dev", "test")


class DataError(Exception):
    """The data cannot be read; the message says which file and what to do."""


@dataclass(frozen=True)
class Reviews:
    """Three splits of (text, label) and the labels' names; ``train`` may still hold duplicates."""

    train: list[Row]
    dev: list[Row]
    test: list[Row]
    labels: list[str]
    public: bool


@dataclass(frozen=True)
class Deduplicated:
    rows: list[Row]
    repeats: int
    """Rows dropped because the same text with the same label is kept once."""
    conflicting_texts: int
    conflicting_rows: int
    """Rows dropped with a text that carries more than one label."""


def load(data: str) -> Reviews:
    """The data set called ``data``: ``mini``, ``chnsenticorp`` (through PaddleNLP), or a folder of TSV files.

    Raises:
        DataError: a file is missing or malformed, or the download is impossible.
    """
    if data == "mini":
        splits = mini_corpus.generate()
        return Reviews(splits["train"], splits["dev"], splits["test"], ["0", "1"], public=True)
    if data == "chnsenticorp":
        return _download_chnsenticorp()
    return load_folder(Path(data))


def load_folder(folder: Path) -> Reviews:
    """``train.tsv``, ``dev.tsv`` and ``test.tsv`` of ``folder``: a header with a label and a text column, no quoting.

    Labels may be any strings; they are numbered in sorted order of those in the training file, so the set of labels
    counts as public.
    """
    if not folder.is_dir():
        raise DataError(f"--data {folder}: no such folder; pass mini, chnsenticorp or a folder with train/dev/test.tsv")
    tables = {name: _read_tsv(folder / f"{name}.tsv") for name in SPLITS}
    labels = sorted({label for _, label in tables["train"]})
    if len(labels) < 2:
        raise DataError(f"{folder / 'train.tsv'}: needs at least two different labels, found {labels}")
    number = {label: i for i, label in enumerate(labels)}
    numbered = {}
    for name, table in tables.items():
        unknown = sorted({label for _, label in table} - set(labels))
        if unknown:
            raise DataError(f"{folder / name}.tsv: labels {unknown} do not occur in train.tsv")
        numbered[name] = [(text, number[label]) for text, label in table]
    return Reviews(numbered["train"], numbered["dev"], numbered["test"], labels, public=False)


def _read_tsv(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; the folder must hold train.tsv, dev.tsv and test.tsv. Nothing is split off: "
            "dev and test rows are not protected by ε, so which rows these are is your choice"
        )
    try:
        return _read_rows(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    except csv.Error as error:
        raise DataError(f"{path}: not readable as TSV ({error})") from error


def _read_rows(path: Path) -> list[tuple[str, str]]:
    # A byte order mark, which spreadsheets write, is not part of the first column's name.
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        header = next(lines, [])
        text_column = next((i for i, name in enumerate(header) if name in ("text_a", "text", "sentence")), None)
        if text_column is None or "label" not in header:
            raise DataError(f"{path}: the first line must name the columns label and text_a, found {header}")
        label_column = header.index("label")
        rows = []
        for number, line in enumerate(lines, start=2):
            if len(line) != len(header):
                raise DataError(f"{path}, line {number}: {len(line)} columns where the header has {len(header)}")
            rows.append((line[text_column].strip(), line[label_column].strip()))
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def _download_chnsenticorp() -> Reviews:
    from paddlenlp.datasets import load_dataset

    try:
        parts = load_dataset("chnsenticorp", splits=list(SPLITS))
    except Exception as error:
        raise DataError(
            "--data chnsenticorp: PaddleNLP could not fetch ChnSentiCorp.zip "
            f"({error}); without a network pass the folder that holds its train.tsv, dev.tsv and test.tsv: --data DIR"
        ) from error
    rows = [[(row["text"].strip(), int(row["label"])) for row in part] for part in parts]
    return Reviews(rows[0], rows[1], rows[2], ["0", "1"], public=False)


def without_test_texts(data: Reviews) -> Reviews:
    """Without the training rows whose text stands in the test file: no accuracy is then had by heart.

    Which rows go depends on the test file alone, so one training row more or less still changes one row at most.

    Raises:
        DataError: no training row is left.
    """
    kept = [row for row, new in zip(data.train, unseen_mask(data.train, data.test)) if new]
    if not kept:
        raise DataError("--drop-test-texts: every training text stands in the test file too; leave the flag out")
    return replace(data, train=kept)


def deduplicate(rows: Sequence[Row]) -> Deduplicated:
    """Each text once, in order of first occurrence; texts with more than one label are left out."""
    labels_of: dict[str, set[int]] = {}
    for text, label in rows:
        labels_of.setdefault(text, set()).add(label)
    kept = [(text, labels.copy().pop()) for text, labels in labels_of.items() if len(labels) == 1]
    conflicting = {text for text, labels in labels_of.items() if len(labels) > 1}
    conflicting_rows = sum(text in conflicting for text, _ in rows)
    return Deduplicated(kept, len(rows) - len(kept) - conflicting_rows, len(conflicting), conflicting_rows)


def share_of(rows: Sequence[Row], train: Sequence[Row]) -> float:
    """Which part of ``rows`` has its text in ``train``, too."""
    unseen = unseen_mask(rows, train)
    return 1.0 - sum(unseen) / len(unseen)


def most_copies(rows: Sequence[Row]) -> int:
    """How often the commonest text occurs."""
    return max(Counter(text for text, _ in rows).values())


def unseen_mask(rows: Sequence[Row], train: Sequence[Row]) -> list[bool]:
    """For each row whether its text stands nowhere in ``train``."""
    known = {text for text, _ in train}
    return [text not in known for text, _ in rows]
