"""Two small networks for grey images, with tanh: its bounded values keep gradients small (Papernot et al. 2021)."""

from __future__ import annotations

from paddle import nn


def mlp(size: int, classes: int = 10, width: int = 256) -> nn.Layer:
    """``[rows, 1, size, size]`` to ``[rows, classes]`` through one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(size * size, width), nn.Tanh(), nn.Linear(width, classes))


def cnn(size: int, classes: int = 10) -> nn.Layer:
    """``[rows, 1, size, size]`` to ``[rows, classes]``; two convolutions, each of which halves the image's sides."""
    side = -(-size // 4)
    return nn.Sequential(
        nn.Conv2D(1, 16, 5, stride=2, padding=2),
        nn.Tanh(),
        nn.Conv2D(16, 32, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * side * side, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


NETWORKS = {"mlp": mlp, "cnn": cnn}
