"""Classify texts with a model that train.py saved.

    python examples/ernie_chnsenticorp/predict.py runs/20260101-120000 "房间很干净，早餐也不错。" "再也不会来了。"
    python examples/ernie_chnsenticorp/predict.py runs/20260101-120000 < texts.txt

Prints a line a text: its label, the label's probability, the text. Answers cost no ε, whatever their number: they are
computed from the released model.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from reviews import Row
    from task import Task

RECIPE, PROBE = "recipe.json", "probe.pdparams"
BATCH = 128


def save(folder: Path, task: Task, strategy: str, max_length: int) -> None:
    """What PaddleNLP's files in ``folder`` do not tell: the length texts are cut at, a prompt, a probe's weights."""
    import paddle

    prompt = None if task.prompt is None else asdict(task.prompt)
    found = {"strategy": strategy, "max_length": max_length, "prompt": prompt}
    (folder / RECIPE).write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if strategy == "probe":
        paddle.save(task.network.head.state_dict(), str(folder / PROBE))


@dataclass(frozen=True)
class Classifier:
    network: Any
    """Maps inputs of :meth:`batches` to scores ``[B, classes]``."""
    labels: list[str]
    tokenizer: Any
    max_length: int
    prompt: Any
    features: Any
    """Makes the network's inputs of encoded rows, or None where these are token ids."""

    def batches(self, rows: list[Row]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Inputs and labels int64 ``[B]`` of the rows, in their order."""
        import ernie
        import paddle
        from batches import EncodedRows, pad_states, pad_tokens

        before = self.prompt.before if self.prompt else ()
        tokens = ernie.encode(self.tokenizer, [text for text, _ in rows], self.max_length, before)
        encoded = EncodedRows(tokens, [label for _, label in rows])
        if self.features is not None:
            encoded = self.features(encoded)
        join = pad_tokens(self.tokenizer.pad_token_id) if self.features is None else pad_states
        for start in range(0, len(rows), BATCH):
            inputs, labels = join([encoded[row] for row in range(start, min(start + BATCH, len(rows)))])
            yield tuple(map(paddle.to_tensor, inputs)), labels

    def probabilities(self, texts: list[str]) -> np.ndarray[Any, Any]:
        """Float32 ``[texts, classes]``."""
        import paddle
        from paddle.nn import functional as F

        with paddle.no_grad():
            parts = [F.softmax(self.network(*inputs)).numpy() for inputs, _ in self.batches([(t, 0) for t in texts])]
        return np.concatenate(parts)


def load(folder: Path) -> Classifier:
    """
    Args:
        folder: ``model`` of a run folder.

    Raises:
        ernie.ModelError: a file is missing.
    """
    import ernie
    import network
    import paddle
    import strategies

    try:
        recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        classes = len(json.loads((folder / "config.json").read_text(encoding="utf-8"))["id2label"])
        # Read here, so that this file, too, is named where it is missing.
        weights = io.BytesIO((folder / PROBE).read_bytes()) if recipe["strategy"] == "probe" else None
    except FileNotFoundError as missing:
        raise ernie.ModelError(f"{missing.filename} is missing; pass the run folder of a run that has ended") from None
    prompt = None if recipe["prompt"] is None else strategies.Prompt(**recipe["prompt"])
    model, tokenizer = ernie.load(str(folder), classes, 0.0, folder, masked_lm=prompt is not None)
    labels = [model.config.id2label[number] for number in range(classes)]
    features = None
    if weights is not None:
        built = strategies.build_network(model, "probe", None, strategies.frozen_layers(model, "probe", None))
        built.head.set_state_dict(paddle.load(weights))

        def features(rows: Any) -> Any:
            return network.layer_features(model, rows, tokenizer.pad_token_id)

    else:
        # Other strategies end in a whole model, whatever part of it was trained.
        built = strategies.build_network(model, "full", prompt, None)
    built.eval()
    return Classifier(built, labels, tokenizer, recipe["max_length"], prompt, features)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("texts", nargs="*", help="texts (default: lines of the standard input)")
    args = parser.parse_args(argv)
    texts = args.texts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    with contextlib.redirect_stderr(io.StringIO()):
        import paddle  # noqa: F401 - advises on ccache, which concerns nobody here
    from ernie import ModelError

    try:
        classifier = load(args.run / "model")
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if texts:
        for text, shares in zip(texts, classifier.probabilities(texts)):
            print(f"{classifier.labels[shares.argmax()]}\t{shares.max():.3f}\t{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
