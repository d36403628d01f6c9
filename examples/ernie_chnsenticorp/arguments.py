"""The flags of train.py, and the defaults that depend on the model."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from resuming import ResumeError, restored_flags

STRATEGIES = ("full", "lora", "bitfit", "head", "probe", "prompt")
HEADS = ("head", "probe")
"""Strategies that train a head alone, on what the whole encoder makes of a text."""
OPTIMIZERS = ("adamw", "adam", "adambc", "momentum", "sgd")
CLIPPINGS = ("flat", "per_layer", "automatic", "psac", "adaptive")
ACCOUNTANTS = ("pld", "rdp", "zcdp")


@dataclass(frozen=True)
class Preset:
    """Defaults of the flags that depend on the model and on whether the training is private."""

    epochs: int
    batch_size: int
    learning_rate: float
    clip_norm: float | None
    max_length: int
    physical_batch_size: int | None
    dropout: float


# Large batches, since a batch gets the same noise whatever its size. RESULTS.md says which of these were measured.
PRESETS = {
    ("tiny", True): Preset(16, 1024, 1e-2, 5.0, 48, 1024, 0.0),
    ("tiny", False): Preset(5, 128, 2e-3, None, 48, None, 0.0),
    ("pretrained", True): Preset(10, 1024, 1e-3, 0.1, 128, 64, 0.0),
    ("pretrained", False): Preset(4, 32, 5e-5, None, 128, None, 0.1),
    ("head", True): Preset(30, 1024, 1e-2, 1.0, 256, 1024, 0.0),
    ("head", False): Preset(10, 32, 1e-3, None, 256, None, 0.1),
    ("probe", True): Preset(30, 1024, 1e-2, 1.0, 256, 1024, 0.0),
    ("probe", False): Preset(10, 32, 1e-3, None, 256, None, 0.0),
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune ERNIE for text classification with differential privacy.",
        epilog="The default of a flag marked * depends on --model, --strategy and --non-private; config.json has it.",
    )
    add = parser.add_argument
    add("--model", default="tiny", help="PaddleNLP name, local directory, or tiny: a small untrained ERNIE (default)")
    add("--data", default="mini", help="chnsenticorp, folder with train/dev/test.tsv, or mini: embedded (default)")
    add("--epsilon", type=_positive, default=3.0, help="privacy budget; training never exceeds it (default 3)")
    add("--delta", type=_probability, default=1e-5, help="δ of the guarantee (default 1e-5)")
    add("--epochs", type=_count, help="passes over the data, in expectation *")
    add("--batch-size", type=_count, help="expected logical batch size *")
    add("--learning-rate", type=_positive, help="peak learning rate, decayed linearly to 0 *")
    add("--encoder-learning-rate", type=_positive, help="peak of the encoder's layers (default --learning-rate)")
    add("--max-length", type=_length, help="tokens kept of a review *")
    add("--clip-norm", type=_clip_norm, help="bound on a row's gradient norm, or auto: the 90th percentile *")
    add("--clip-norm-data", help="public data (as --data) from which --clip-norm auto reads the norms")
    add("--strategy", choices=STRATEGIES, default="full", help="what is trained (default full)")
    add("--prompt", default="很[MASK]。", help="what --strategy prompt puts before a text (default 很[MASK]。)")
    add("--label-words", type=_words, metavar="W,W", help="one word a label, sorted as the labels (default 差,好)")
    add("--freeze-layers", type=_layers, metavar="K", help="freeze the embeddings and the first K encoder layers")
    add("--state-cache", type=Path, metavar="DIR", help="keep what frozen layers make of the rows, for further runs")
    add("--physical-batch-size", type=_count, help="rows per forward pass; bounds memory, changes nothing else *")
    add("--clipping", choices=CLIPPINGS, default="flat", help="how gradients are clipped (default flat)")
    add("--accountant", choices=ACCOUNTANTS, default="pld", help="pld (default) is the tightest")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="the update rule (default adamw)")
    add("--ema", type=_fraction, metavar="DECAY", help="test and save a moving average of the weights, e.g. 0.95")
    add("--weight-decay", type=_non_negative, default=0.0, help="decoupled with adamw, L2 otherwise (default 0)")
    add("--dropout", type=_fraction, help="dropout probability *")
    add("--seed", type=_layers, default=0, help="of initial weights; noise and sampling use the system's randomness")
    add("--output", type=Path, help="run folder, must be new (default runs/DATE-TIME)")
    add("--keep-duplicates", action="store_true", help="train on repeated texts; each copy weakens their protection")
    add("--drop-test-texts", action="store_true", help="leave out training rows whose text stands in the test file")
    add("--non-private", action="store_true", help="the same training without clipping and noise, for comparison")
    add("--dry-run", action="store_true", help="print noise, ε, time and memory of the run, measured on random text")
    add(
        "--staged",
        action="store_true",
        help="first train with clipping but no noise on public rows, and stop if that does not learn; then train "
        "privately from the original weights. With --non-private: the first stage alone, on the rows of --data",
    )
    add("--staged-data", metavar="DATA", help="public data (as --data) of the first stage, e.g. mini")
    add("--resume", type=Path, metavar="FOLDER", help="go on with an interrupted run, under its own flags and budget")
    args = parser.parse_args(argv)
    if args.resume is not None:
        return _resumed(parser, argv)
    if args.clip_norm_data is not None and args.clip_norm != "auto":
        parser.error("--clip-norm-data is used by --clip-norm auto only")
    if args.staged_data is not None and (not args.staged or args.non_private):
        parser.error("--staged-data is used by --staged only, and not with --non-private")
    if args.dry_run and args.staged:
        parser.error("--dry-run trains nothing, and --staged trains twice; pass one of them")
    plain = args.non_private and not args.staged
    for flag in ("clip_norm", "physical_batch_size"):
        if plain and getattr(args, flag) is not None:
            parser.error(f"--{flag.replace('_', '-')} has no meaning with --non-private")
    if args.non_private and args.optimizer == "adambc":
        parser.error("--optimizer adambc corrects for privacy noise, which --non-private does not add")
    if args.label_words is not None and args.strategy != "prompt":
        parser.error("--label-words is used by --strategy prompt only")
    if args.strategy in HEADS and args.freeze_layers is not None:
        parser.error(f"--strategy {args.strategy} freezes all layers; leave --freeze-layers out")
    kind = "tiny" if args.model == "tiny" else args.strategy if args.strategy in HEADS else "pretrained"
    preset = PRESETS[kind, not plain]
    for name, value in vars(preset).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.output is None:
        args.output = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    return args


def _resumed(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The flags of the run that goes on."""
    defaults = vars(parser.parse_args([]))
    # argparse gives no default to what a namespace already has, so this tells which flags were named.
    absent = object()
    flags = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(defaults, absent)))
    given = {name: value for name, value in vars(flags).items() if value is not absent}
    if given.get("dry_run"):
        parser.error("--dry-run is about a run that has not begun; leave --resume out")
    try:
        return restored_flags(given, defaults, given["resume"])
    except ResumeError as refusal:
        parser.error(str(refusal))


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def _non_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text}")
    return value


def _probability(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must lie strictly between 0 and 1, got {text}")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return value


def _layers(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text}")
    return value


def _length(text: str) -> int:
    value = int(text)
    if value < 3:
        raise argparse.ArgumentTypeError(f"must be at least 3: [CLS], one token and [SEP], got {text}")
    return value


def _words(text: str) -> list[str]:
    return text.split(",")


def _clip_norm(text: str) -> float | str:
    return "auto" if text == "auto" else _positive(text)
