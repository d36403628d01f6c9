"""examples/image_classification here and in Opacus at ε = 3: the same grid on dev for each, then several seeds on test.

    python benchmarks/peers/compare_images.py --python PEER/bin/python --network mlp
    python benchmarks/peers/compare_images.py --python PEER/bin/python --data digits --epochs 30 --batch-size 256

PEER: an environment with torch, opacus and numpy (and scikit-learn for ``--data digits``). A run of the grid is one
seed of one (learning rate, clip norm); the pair with the best dev accuracy is run with ``--seeds`` other seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
RECIPE = HERE.parents[1] / "examples" / "image_classification" / "train.py"


def run_here(python: str, flags: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        subprocess.run([python, str(RECIPE), *flags, "--output", str(output)], check=True, capture_output=True)
        summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
        last = json.loads((output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return {**summary, "dev_accuracy": last["dev_accuracy"], "noise_multiplier": summary["privacy"]["noise_multiplier"]}


def run_opacus(python: str, flags: list[str]) -> dict:
    out = subprocess.run([python, str(HERE / "opacus_images.py"), *flags], check=True, capture_output=True, text=True)
    return json.loads(out.stdout.splitlines()[-1])


KINDS: dict[str, tuple[str, Callable[[str, list[str]], dict], list[str]]] = {
    "here": ("paddle_privacy", run_here, []),
    "opacus": ("Opacus", run_opacus, []),
    "opacus-paddle-weights": ("Opacus, initial weights as Paddle's", run_opacus, ["--weights", "paddle"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--python", required=True, metavar="PATH", help="the interpreter that has torch and opacus")
    add("--paddle-python", default=sys.executable, metavar="PATH", help="the one that has paddle (default: this one)")
    add("--data")
    add("--network", choices=("mlp", "cnn"), default="mlp")
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=2048)
    add("--learning-rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3])
    add("--clip-norms", type=float, nargs="+", default=[1.0])
    add("--seeds", type=int, default=3)
    add("--of", nargs="+", choices=KINDS, default=list(KINDS), help="which of the three to run (default: all)")
    args = parser.parse_args()
    common = ["--network", args.network, "--epochs", str(args.epochs), "--batch-size", str(args.batch_size)]
    common += ["--data", args.data] if args.data else []
    for kind in args.of:
        name, run, own = KINDS[kind]
        python = args.paddle_python if run is run_here else args.python
        tried = {}
        for rate, clip_norm in itertools.product(args.learning_rates, args.clip_norms):
            flags = [*common, *own, "--learning-rate", str(rate), "--clip-norm", str(clip_norm)]
            tried[rate, clip_norm] = run(python, [*flags, "--seed", "100"])["dev_accuracy"]
            print(f"{name}: learning rate {rate:g}, C {clip_norm:g}: dev {tried[rate, clip_norm]:.2%}", flush=True)
        rate, clip_norm = max(tried, key=lambda setting: tried[setting])
        flags = [*common, *own, "--learning-rate", str(rate), "--clip-norm", str(clip_norm)]
        found = [run(python, [*flags, "--seed", str(seed)]) for seed in range(args.seeds)]
        scores = [one["test_accuracy"] for one in found]
        print(
            f"{name}: learning rate {rate:g}, C {clip_norm:g}, σ={found[0]['noise_multiplier']:.4f}, "
            f"ε={found[0]['epsilon']:.4f}: test {statistics.mean(scores):.2%} ± {statistics.stdev(scores):.2%} "
            f"({', '.join(f'{score:.2%}' for score in scores)}), {statistics.mean(o['seconds'] for o in found):.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
