"""Can a loss tell who was in the training file? Runs of train.py on the same data, side by side.

    python examples/ernie_chnsenticorp/membership.py --data DIR runs/private runs/non-private

Members are training rows drawn at random, of those whose text does not stand in the test file (others are no members of
a run with ``--drop-test-texts``); non-members the test rows whose text stands nowhere in the training file.
The attack is the loss threshold (Yeom et al. 2018). The two files may differ in more than membership, so an AUC a
little off 1/2 is no evidence of a leak; audited.py, where a coin decides who is in, gives bounds that hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import reviews
from audited import scores_of
from run_folder import print_table


def main(argv: list[str] | None = None) -> int:
    from paddle_privacy.audit import evaluate_attack, loss_threshold_scores

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True, help="as train.py's")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of members")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    args = parser.parse_args(argv)
    data = reviews.load(args.data)
    unseen = reviews.unseen_mask(data.test, data.train)
    outside = [row for row, new in zip(data.test, unseen) if new]
    train = reviews.deduplicate(reviews.without_test_texts(data).train).rows
    chosen = np.random.default_rng(args.seed).permutation(len(train))[: len(outside)]
    rows = [train[row] for row in chosen] + outside
    included = np.arange(len(rows)) < len(chosen)
    table = []
    for run in args.runs:
        losses, _ = scores_of(run / "model", rows)
        found = evaluate_attack("loss threshold", loss_threshold_scores(losses), included)
        low, high = found.auc_interval
        table.append((str(run), f"AUC {found.auc:.3f} ({low:.3f} – {high:.3f})"))
    print_table(f"{len(chosen)} members, {len(outside)} non-members of {args.data}", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
