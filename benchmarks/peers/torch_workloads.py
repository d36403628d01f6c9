"""The rows of `../workloads.py` in PyTorch: same shapes, same trained parameters, fixed random batches.

Attention is written with Linear layers and ``scaled_dot_product_attention``, which Opacus's hooks take as it is;
``nn.MultiheadAttention`` would have to be replaced by Opacus's slower ``DPMultiheadAttention``. The LSTM has no such
choice: a private run uses ``DPLSTM``, the plain one ``nn.LSTM``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

# A model, the inputs of its forward pass, the labels.
Made = tuple[nn.Module, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """How to make a model (told whether for a private run), the batch, and the clipping of the private step."""

    make: Callable[[bool], Made]
    batch: int
    clipping: str = "flat"
    modes: tuple[str, ...] = ("hooks", "ghost")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    """Post-norm, as ``paddle.nn.TransformerEncoderLayer``, with its three dropouts."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.self_attn = Attention(width, heads, dropout)
        self.linear1, self.linear2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout1, self.dropout2, self.inner = (nn.Dropout(dropout) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.dropout1(self.self_attn(x)))
        return self.norm2(x + self.dropout2(self.linear2(self.inner(F.gelu(self.linear1(x))))))


class Encoder(nn.Module):
    def __init__(self, layers: int = 6, width: int = 384, heads: int = 12, vocab: int = 18000):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, 0.1) for _ in range(layers)))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # Not expand: Opacus's ghost clipping calls view() on the row numbers, which fails where they share memory.
        places = torch.arange(ids.shape[1]).repeat(len(ids), 1)
        hidden = self.layers(self.norm(self.words(ids) + self.positions(places)))
        return self.head(torch.tanh(self.pooler(hidden[:, 0])))


def encoder(batch: int, length: int) -> Made:
    return Encoder(), torch.randint(1, 18000, (batch, length)), torch.randint(0, 2, (batch,))


def bias_only(batch: int, length: int) -> Made:
    model, ids, labels = encoder(batch, length)
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model, ids, labels


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def lora(batch: int, length: int, rank: int = 8) -> Made:
    model, ids, labels = encoder(batch, length)
    model.requires_grad_(False)
    for layer in model.layers:
        attention = layer.self_attn
        attention.q_proj, attention.v_proj = Adapted(attention.q_proj, rank), Adapted(attention.v_proj, rank)
    model.head.requires_grad_(True)
    return model, ids, labels


class Block(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, cout), nn.GroupNorm(8, cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride, bias=False) if stride > 1 or cin != cout else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.skip is None else self.skip(x)))


def resnet20(batch: int) -> Made:
    blocks = [
        Block(16 if i == 0 and s == 0 else (c if i else c // 2), c, 2 if i == 0 and s else 1)
        for s, c in enumerate((16, 32, 64))
        for i in range(3)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.GroupNorm(8, 16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))


def lstm(batch: int, length: int, private: bool) -> Made:
    from opacus.layers import DPLSTM

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(10000, 128), nn.Linear(256, 2)
            self.lstm = (DPLSTM if private else nn.LSTM)(128, 256, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(self.words(ids))[0][:, -1])

    return Classifier(), torch.randint(1, 10000, (batch, length)), torch.randint(0, 2, (batch,))


def big_embedding(batch: int, rows: int, width: int = 64, length: int = 16) -> Made:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(rows, width), nn.Linear(width, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(ids).mean(dim=1))

    return Classifier(), torch.randint(0, rows, (batch, length)), torch.randint(0, 2, (batch,))


ROWS: dict[str, Row] = {
    "encoder": Row(lambda private: encoder(16, 128), 16),
    # Ghost clipping with a bound for each layer is refused by Opacus ("Unsupported combination of parameters").
    "encoder-per-layer": Row(lambda private: encoder(16, 128), 16, clipping="per_layer", modes=("hooks",)),
    "encoder-T512": Row(lambda private: encoder(4, 512), 4),
    "lora": Row(lambda private: lora(16, 128), 16),
    "bitfit": Row(lambda private: bias_only(16, 128), 16),
    "resnet20": Row(lambda private: resnet20(64), 64),
    "lstm": Row(lambda private: lstm(32, 64, private), 32),
    "embedding-1e4": Row(lambda private: big_embedding(1024, 10_000), 1024),
    # Hooks would hold a gradient of the whole table for each of 1024 samples: 244 GiB.
    "embedding-1e6": Row(lambda private: big_embedding(1024, 1_000_000), 1024, modes=("ghost",)),
}
