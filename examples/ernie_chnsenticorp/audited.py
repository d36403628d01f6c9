"""The recipe under attack: are mislabelled reviews recognisable in what it trained?

    paddle-privacy audit examples/ernie_chnsenticorp/audited.py:private --canaries 400 -o audit.json
    paddle-privacy audit examples/ernie_chnsenticorp/audited.py:non_private --canaries 400

Canaries are reviews of the test file with the wrong label. A coin each decides which of them join the training file;
then ``train.py`` runs as for anybody, and the model's losses on all canaries are handed to the audit.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import predict
import reviews

EPSILON, DELTA = 3.0, 1e-5


def private(coins: np.ndarray) -> Any:
    """The recipe at ε <= 3."""
    return attacked(coins, ["--epsilon", str(EPSILON), "--delta", str(DELTA)])


def non_private(coins: np.ndarray) -> Any:
    """Training without clipping and noise, on few rows for long: what the audit must be able to see."""
    return attacked(coins, ["--non-private", "--epochs", "150"], rows=1200)


def attacked(coins: np.ndarray, flags: list[str], rows: int | None = None) -> Any:
    """Trains on the mini corpus (or its first ``rows``) plus the canaries whose coin is true; scores all canaries."""
    from train import main

    from paddle_privacy.audit import ScoredRun, loss_threshold_scores

    data = reviews.load("mini")
    canaries = [(text, 1 - label) for text, label in distinct(data.test)[: len(coins)]]
    if len(canaries) < len(coins):
        raise ValueError(f"canaries is {len(coins)}; the test file has {len(canaries)} different reviews")
    seen = {text for text, _ in canaries}
    train_rows = [row for row in data.train if row[0] not in seen][:rows]
    train_rows += [row for row, coin in zip(canaries, coins) if coin]
    with tempfile.TemporaryDirectory() as folder:
        corpus, run = Path(folder, "corpus"), Path(folder, "run")
        corpus.mkdir()
        for name, rows in (("train", train_rows), ("dev", data.dev), ("test", data.test)):
            write_tsv(corpus / f"{name}.tsv", rows)
        if main(["--data", str(corpus), "--output", str(run), *flags]):
            raise RuntimeError("the recipe did not run; its message is above")
        losses, _ = scores_of(run / "model", canaries)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    labels = np.array([label for _, label in canaries])
    return ScoredRun(
        {"loss threshold": loss_threshold_scores(losses)},
        math.inf if summary["epsilon"] is None else summary["epsilon"],
        DELTA,
        labels,
    )


def distinct(rows: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return list({text: (text, label) for text, label in rows}.values())


def scores_of(folder: Path, rows: list[tuple[str, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Loss and class probabilities of each row under the model that a run saved in ``folder``."""
    from paddle_privacy.audit import losses_and_probabilities

    classifier = predict.load(folder)

    def forward(network: Any, inputs: tuple[Any, ...]) -> Any:
        return network(*inputs)

    return losses_and_probabilities(classifier.network, classifier.batches(rows), forward)


def write_tsv(path: Path, rows: list[tuple[str, int]]) -> None:
    lines = ["label\ttext_a", *(f"{label}\t{text}" for text, label in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
