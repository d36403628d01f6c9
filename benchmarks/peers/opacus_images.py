"""The networks of examples/image_classification trained with Opacus: same rows, epochs, batch size, clip norm, ε.

    PEER/bin/python benchmarks/peers/opacus_images.py --network mlp --learning-rate 2e-3 --seed 0

PEER: an environment with torch, opacus and numpy (and scikit-learn for ``--data digits``). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "examples" / "image_classification"))
from images import load


def mlp(size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, 256), nn.Tanh(), nn.Linear(256, 10))


def cnn(size: int) -> nn.Module:
    side = -(-size // 4)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * side * side, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


NETWORKS = {"mlp": mlp, "cnn": cnn}


def like_paddle(model: nn.Module) -> None:
    """Paddle's initial weights: Glorot-uniform Linear, He-normal convolutions, biases zero."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
        elif isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, 0, (2 / (layer.in_channels * layer.kernel_size[0] ** 2)) ** 0.5)
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.zeros_(layer.bias)


@torch.no_grad()
def accuracy(model: nn.Module, split: tuple) -> float:
    pixels, labels = (torch.from_numpy(array.copy()) for array in split)
    return float((model(pixels).argmax(-1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data")
    add("--network", choices=NETWORKS, default="mlp")
    add("--epsilon", type=float, default=3.0)
    add("--delta", type=float, default=1e-5)
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=2048)
    add("--learning-rate", type=float, default=2e-3)
    add("--clip-norm", type=float, default=1.0)
    add("--physical-batch-size", type=int, default=4096)
    add("--mode", choices=("hooks", "ghost"), default="ghost", help="how Opacus clips; the result is the same")
    add("--accountant", default="prv", help="Opacus's default is prv")
    add("--weights", choices=("torch", "paddle"), default="torch", help="whose initial weights")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")

    started = time.monotonic()
    images = load(args.data)
    torch.manual_seed(args.seed)
    model = NETWORKS[args.network](images.size)
    if args.weights == "paddle":
        like_paddle(model)
    rows = torch.utils.data.TensorDataset(*(torch.from_numpy(array.copy()) for array in images.train))
    engine = PrivacyEngine(accountant=args.accountant)
    criterion: Callable = nn.CrossEntropyLoss()
    model, optimizer, *wrapped, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=args.learning_rate),
        data_loader=torch.utils.data.DataLoader(rows, batch_size=args.batch_size, shuffle=True),
        criterion=criterion,
        grad_sample_mode=args.mode,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.clip_norm,
    )
    if wrapped:  # ghost clipping brings a loss of its own, whose backward() runs twice
        (criterion,) = wrapped
    for _ in range(args.epochs):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=args.physical_batch_size, optimizer=optimizer
        ) as pieces:
            for pixels, labels in pieces:
                optimizer.zero_grad()
                criterion(model(pixels), labels).backward()
                optimizer.step()
    model.eval()
    found = {
        "dev_accuracy": accuracy(model, images.dev),
        "test_accuracy": accuracy(model, images.test),
        "epsilon": engine.get_epsilon(args.delta),
        "noise_multiplier": optimizer.noise_multiplier,
        "seconds": time.monotonic() - started,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
