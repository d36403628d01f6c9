"""Train an image classifier under a privacy budget: Fashion-MNIST, or scikit-learn's digits.

    python examples/image_classification/train.py                          # Debian's dataset-fashion-mnist
    python examples/image_classification/train.py --network cnn --epsilon 1
    python examples/image_classification/train.py --data digits

:func:`private_optimizer` is what makes it private; :func:`train` is Paddle's usual loop.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from images import DataError, Images, load, views
from networks import NETWORKS
from paddle.io import DataLoader
from paddle.nn import functional as F

from paddle_privacy import DPSGD, DPAdam, Ledger, PoissonBatchSampler

# Learning rates of mlp were chosen on dev rows (RESULTS.md), those of cnn taken over.
PRESETS = {
    "fashion": {"epochs": 20, "batch_size": 2048, "learning_rate": 4e-3, "clip_norm": 1.0},
    "digits": {"epochs": 30, "batch_size": 216, "learning_rate": 8e-3, "clip_norm": 1.0},
}


class RowNumbers:
    """A data set of row numbers; ``collate_fn`` then takes all rows of a batch out of the arrays at once."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> int:
        return row


def private_optimizer(args: argparse.Namespace, model: Any, images: Images, ledger: Any) -> tuple[DataLoader, Any]:
    """Poisson batches, and the optimizer that clips, adds noise and counts."""
    pixels, labels = images.train
    rows = RowNumbers(len(pixels))
    sampler = PoissonBatchSampler(rows, args.batch_size, max_physical_batch_size=args.physical_batch_size)
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=lambda batch: (pixels[batch], labels[batch]))
    optimizer = {"adam": DPAdam, "sgd": DPSGD}[args.optimizer](
        parameters=model.parameters(),
        learning_rate=args.learning_rate,
        clip_norm=args.clip_norm,
        batch_size=args.batch_size,
        epochs=args.epochs,
        data_loader=loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        max_epsilon=args.epsilon,
        accountant=args.accountant,
        ledger=ledger,
    )
    return loader, optimizer


def plain_optimizer(args: argparse.Namespace, model: Any, images: Images) -> tuple[DataLoader, Any]:
    pixels, labels = images.train
    rows = RowNumbers(len(pixels))
    loader = DataLoader(
        rows, batch_size=args.batch_size, shuffle=True, collate_fn=lambda batch: (pixels[batch], labels[batch])
    )
    make = {"adam": paddle.optimizer.Adam, "sgd": paddle.optimizer.SGD}[args.optimizer]
    return loader, make(parameters=model.parameters(), learning_rate=args.learning_rate)


def train(args: argparse.Namespace, model: Any, images: Images, loader: DataLoader, optimizer: Any) -> None:
    started = time.monotonic()
    random = np.random.default_rng()
    for epoch in range(1, args.epochs + 1):
        for pixels, labels in loader:
            # A forward each and one backward: a row's gradient is that of its mean loss, and is clipped as one.
            seen = views(pixels.numpy(), args.views, args.mirror, random)
            losses = [F.cross_entropy(model(paddle.to_tensor(view)), labels) for view in seen]
            (sum(losses[1:], losses[0]) / args.views).backward()
            optimizer.step()
            optimizer.clear_grad()
        # The training loss is not shown: it is a function of rows that ε does not cover.
        found = {"epoch": epoch, "dev_accuracy": accuracy(model, images.dev)}
        found["epsilon"] = None if args.non_private else optimizer.get_privacy_spent(args.delta).epsilon
        with (args.output / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        spent = "" if args.non_private else f"  ε {found['epsilon']:.3f}"
        elapsed = time.monotonic() - started
        print(
            f"epoch {epoch}/{args.epochs}  dev accuracy {found['dev_accuracy']:.2%}{spent}  {elapsed:.0f} s", flush=True
        )


@paddle.no_grad()
def accuracy(model: Any, split: Any) -> float:
    correct = 0
    for start in range(0, len(split[0]), 1000):
        pixels, labels = (paddle.to_tensor(array[start : start + 1000]) for array in split)
        correct += int((model(pixels).argmax(-1) == labels).sum())
    return correct / len(split[0])


def summarise(args: argparse.Namespace, model: Any, images: Images, optimizer: Any, seconds: float) -> dict[str, Any]:
    summary = {"test_accuracy": accuracy(model, images.test), "test_rows": len(images.test[0]), "seconds": seconds}
    if not args.non_private:
        summary["epsilon"] = optimizer.get_privacy_spent(args.delta).epsilon
        summary["privacy"] = optimizer.privacy_statement()
    return summary


def print_summary(args: argparse.Namespace, summary: dict[str, Any]) -> None:
    rows = [("test accuracy", f"{summary['test_accuracy']:.2%} of {summary['test_rows']} rows")]
    if args.non_private:
        rows.append(("privacy", "none"))
    else:
        statement = summary["privacy"]
        rows += [
            ("ε (epsilon)", f"{summary['epsilon']:.4f}"),
            ("δ (delta)", f"{args.delta:g}"),
            ("σ (noise multiplier)", f"{statement['noise_multiplier']:.4f}"),
            ("C (clip norm)", f"{args.clip_norm:g}"),
            ("unit of privacy", statement["unit"]),
            ("relation", str(statement["relation"]).replace("_", " ")),
            ("sampling", f"{statement['sampling']}, {args.batch_size} expected rows"),
            ("accountant", statement["accountant"]),
        ]
    rows += [("time", f"{summary['seconds']:.0f} s"), ("run folder", str(args.output))]
    print(f"{args.network} on {args.data or 'Fashion-MNIST'}")
    for name, value in rows:
        print(f"  {name:<20}  {value}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", help="folder with the four idx-ubyte.gz files, or digits (default: where Debian's package puts them)")
    add("--network", choices=NETWORKS, default="mlp")
    add("--epsilon", type=float, default=3.0)
    add("--delta", type=float, default=1e-5)
    add("--optimizer", choices=("adam", "sgd"), default="adam")
    add("--accountant", choices=("rdp", "pld"), default="pld", help="pld is tighter, rdp has a closed form")
    add("--physical-batch-size", type=int, default=512, help="rows per forward pass; bounds memory (default 512)")
    for name, kind in (("epochs", int), ("batch-size", int), ("learning-rate", float), ("clip-norm", float)):
        add(f"--{name}", type=kind, help="default by data; config.json records it")
    add("--views", type=int, default=1, help="augmented versions of a row whose gradients are averaged before clipping")
    add("--seed", type=int, default=0, help="of initial weights; noise and sampling use the system's randomness")
    add("--output", type=Path, default=Path("runs") / time.strftime("images-%Y%m%d-%H%M%S"), help="must be new")
    add("--non-private", action="store_true", help="the same training without clipping and noise")
    args = parser.parse_args(argv)
    if args.views < 1:
        parser.error("--views must be at least 1")
    # A mirrored shoe is a shoe, a mirrored digit is none.
    args.mirror = args.data != "digits"
    for name, value in PRESETS["digits" if args.data == "digits" else "fashion"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    started = time.monotonic()
    try:
        images = load(args.data)
        args.output.mkdir(parents=True)
        paddle.seed(args.seed)
        model = NETWORKS[args.network](images.size)
        if args.non_private:
            loader, optimizer = plain_optimizer(args, model, images)
        else:
            ledger = Ledger(args.output / "ledger.jsonl")
            loader, optimizer = private_optimizer(args, model, images, ledger)
    except (DataError, FileExistsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    flags = {name: str(value) if name == "output" else value for name, value in vars(args).items()}
    (args.output / "config.json").write_text(json.dumps(flags, indent=2) + "\n", encoding="utf-8")
    train(args, model, images, loader, optimizer)
    if not args.non_private:
        ledger.close()
    paddle.save(model.state_dict(), str(args.output / "model.pdparams"))
    summary = summarise(args, model, images, optimizer, time.monotonic() - started)
    (args.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_summary(args, summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
