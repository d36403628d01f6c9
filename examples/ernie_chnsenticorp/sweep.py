"""Accuracy against ε: every strategy at ε = 1, 3, 8 and without privacy, some seeds each, as a table and a plot.

    python sweep.py --model DIR --data DIR --output DIR
    python sweep.py --model DIR --data DIR --output DIR --only head,last-layer --seeds 3
    python sweep.py --output DIR --table-only

A run is one call of train.py and leaves its run folder in the output folder; runs that are there are not repeated, so
the sweep can be stopped and started again. table.md and accuracy.png are written anew after each run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EPSILONS = (1.0, 3.0, 8.0, math.inf)


@dataclass(frozen=True)
class Setting:
    """One row of the table at each ε; the flags were chosen on dev rows (RESULTS.md says with how many runs)."""

    name: str
    shared: str
    private: str
    plain: str

    @property
    def slug(self) -> str:
        return self.name.lower().replace(",", "").replace(" ", "-")

    def flags(self, epsilon: float) -> list[str]:
        if math.isinf(epsilon):
            return f"{self.shared} {self.plain} --non-private".split()
        return f"{self.shared} {self.private} --epsilon {epsilon:g}".split()


SETTINGS = (
    Setting(
        "head",
        "--strategy head --max-length 256",
        "--epochs 30 --batch-size 1024 --physical-batch-size 1024 --learning-rate 0.01 --clip-norm 1",
        "--epochs 10 --batch-size 32 --learning-rate 0.001",
    ),
    Setting(
        "probe",
        "--strategy probe --max-length 256",
        "--epochs 30 --batch-size 1024 --physical-batch-size 1024 --learning-rate 0.01 --clip-norm 1",
        "--epochs 10 --batch-size 32 --learning-rate 0.001",
    ),
    Setting(
        "last layer",
        "--freeze-layers 3 --max-length 96",
        "--epochs 6 --batch-size 1024 --physical-batch-size 256 --learning-rate 2e-4 --clip-norm 0.5",
        "--epochs 3 --batch-size 32 --learning-rate 1e-4",
    ),
    Setting(
        "LoRA, last two layers",
        "--strategy lora --freeze-layers 2 --max-length 64",
        "--epochs 4 --batch-size 1024 --physical-batch-size 128 --learning-rate 1e-3 --clip-norm 0.5",
        "--epochs 3 --batch-size 32 --learning-rate 5e-4",
    ),
    Setting(
        "BiTFiT, last two layers",
        "--strategy bitfit --freeze-layers 2 --max-length 64",
        "--epochs 4 --batch-size 1024 --physical-batch-size 128 --learning-rate 2e-3 --clip-norm 0.5",
        "--epochs 3 --batch-size 32 --learning-rate 1e-3",
    ),
    Setting(
        "all layers",
        "--strategy full",
        "--freeze-layers 0 --max-length 64 --epochs 4 --batch-size 1024 --physical-batch-size 128 "
        "--learning-rate 1e-3 --clip-norm 0.1",
        "--max-length 96 --epochs 4 --batch-size 32 --learning-rate 1e-4",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    if not args.table_only:
        for seed in range(args.seeds):
            for setting in args.only:
                for epsilon in args.epsilons:
                    run(args, setting, epsilon, seed)
                    write_results(args.output)
    write_results(args.output)
    return 0


def run(args: argparse.Namespace, setting: Setting, epsilon: float, seed: int) -> None:
    """One run of train.py, unless its folder says that it was completed."""
    folder = args.output / folder_name(setting, epsilon, seed)
    if (folder / "summary.json").is_file():
        return
    if folder.exists():
        raise SystemExit(f"{folder}: was begun and not completed; train.py --resume goes on with it, or remove it")
    train = Path(__file__).with_name("train.py")
    where = ["--model", args.model, "--data", args.data, "--seed", str(seed), "--output", str(folder)]
    cache = ["--state-cache", str(args.output / "states")]
    print(f"--- {setting.name}, ε = {_show(epsilon)}, seed {seed}", flush=True)
    subprocess.run([sys.executable, str(train), *where, *cache, *setting.flags(epsilon)], check=True)


def folder_name(setting: Setting, epsilon: float, seed: int) -> str:
    return f"{setting.slug}_{'inf' if math.isinf(epsilon) else f'{epsilon:g}'}_{seed}"


def completed(output: Path, setting: Setting, epsilon: float) -> list[dict[str, Any]]:
    """The summaries of the runs there are, each with its config under ``config``."""
    found = []
    for path in sorted(output.glob(f"{folder_name(setting, epsilon, 0)[:-1]}[0-9]*/summary.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        summary["config"] = json.loads(path.with_name("config.json").read_text(encoding="utf-8"))
        metrics = path.with_name("metrics.jsonl").read_text(encoding="utf-8").splitlines()
        summary["dev_accuracy"] = json.loads(metrics[-1])["dev_accuracy"]
        found.append(summary)
    return found


def write_results(output: Path) -> None:
    cells = [(s, epsilon, runs) for s in SETTINGS for epsilon in EPSILONS if (runs := completed(output, s, epsilon))]
    if not cells:
        return
    (output / "table.md").write_text(table(cells), encoding="utf-8")
    plot(cells, output / "accuracy.png")


def table(cells: list[tuple[Setting, float, list[dict[str, Any]]]]) -> str:
    """Accuracies as mean ± standard deviation over runs, and as a share of the best non-private mean."""
    plain = [_mean(runs, "test_accuracy") for _, epsilon, runs in cells if math.isinf(epsilon)]
    best = max(plain, default=math.nan)
    unseen = [_mean(runs, "test_accuracy_unseen") for _, epsilon, runs in cells if math.isinf(epsilon)]
    best_unseen = max(unseen, default=math.nan)
    lines = [
        "| strategy | ε | dev | test | kept | unseen | kept | σ | C | batch | epochs | lr | runs | CPU min | GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting, epsilon, runs in cells:
        flags, private = runs[0]["config"]["flags"], not math.isinf(epsilon)
        columns = [
            setting.name,
            _show(epsilon),
            _spread(runs, "dev_accuracy"),
            _spread(runs, "test_accuracy"),
            f"{_mean(runs, 'test_accuracy') / best:.1%}",
            _spread(runs, "test_accuracy_unseen"),
            f"{_mean(runs, 'test_accuracy_unseen') / best_unseen:.1%}",
            f"{runs[0]['noise_multiplier']:.3f}" if private else "–",
            f"{runs[0]['clip_norm']:g}" if private else "–",
            str(flags["batch_size"]),
            str(flags["epochs"]),
            f"{flags['learning_rate']:g}",
            str(len(runs)),
            f"{_mean(runs, 'cpu_seconds') / 60:.1f}" if all("cpu_seconds" in run for run in runs) else "–",
            f"{max(run['peak_memory_mib'] for run in runs) / 1024:.1f}",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def plot(cells: list[tuple[Setting, float, list[dict[str, Any]]]], path: Path) -> None:
    """Test accuracy against ε, one line a strategy; without privacy as the last point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    place = {epsilon: i for i, epsilon in enumerate(EPSILONS)}
    for setting in SETTINGS:
        own = [(place[e], runs) for s, e, runs in cells if s is setting]
        if not own:
            continue
        means = [_mean(runs, "test_accuracy") for _, runs in own]
        spreads = [_deviation(runs, "test_accuracy") for _, runs in own]
        axes.errorbar([x for x, _ in own], means, yerr=spreads, marker="o", capsize=3, label=setting.name)
    axes.set_xticks(list(place.values()), [f"ε = {_show(epsilon)}" for epsilon in EPSILONS])
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    by_name = {setting.slug: setting for setting in SETTINGS}
    parser.add_argument("--model", help="as train.py's; needed unless --table-only")
    parser.add_argument("--data", help="as train.py's; needed unless --table-only")
    parser.add_argument("--output", type=Path, required=True, help="folder of run folders, table.md and accuracy.png")
    parser.add_argument("--only", default=",".join(by_name), help=f"some of {','.join(by_name)}")
    parser.add_argument("--epsilons", default="1,3,8,inf", help="some of 1,3,8,inf")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each setting at each ε (default 3)")
    parser.add_argument("--table-only", action="store_true", help="write the table and plot of the runs there are")
    args = parser.parse_args(argv)
    unknown = set(args.only.split(",")) - set(by_name)
    if unknown:
        parser.error(f"--only: no setting called {', '.join(sorted(unknown))}; there are {', '.join(by_name)}")
    args.only = [by_name[name] for name in args.only.split(",")]
    args.epsilons = [float(text) for text in args.epsilons.split(",")]
    if not set(args.epsilons) <= set(EPSILONS):
        parser.error("--epsilons: some of 1,3,8,inf")
    if not args.table_only and (args.model is None or args.data is None):
        parser.error("--model and --data are needed unless --table-only")
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    return args


def _mean(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(run[name] for run in runs)


def _deviation(runs: list[dict[str, Any]], name: str) -> float:
    return statistics.stdev(run[name] for run in runs) if len(runs) > 1 else 0.0


def _spread(runs: list[dict[str, Any]], name: str) -> str:
    """Mean ± standard deviation over runs; one run has no deviation."""
    mean = f"{_mean(runs, name):.2%}"
    return f"{mean} ± {_deviation(runs, name) * 100:.2f}" if len(runs) > 1 else mean


def _show(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


if __name__ == "__main__":
    sys.exit(main())
