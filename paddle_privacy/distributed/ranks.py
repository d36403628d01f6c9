"""The processes of a data-parallel run and the few collectives that a private step needs of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor

from paddle_privacy.errors import PrivacyError

# Elements of a bucket: 32 MB of float32. Small tensors travel together, large ones alone and without a copy.
_BUCKET = 1 << 23


def current_ranks() -> Ranks | None:
    """The default process group; None where ``paddle.distributed`` is not initialised or has one process."""
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    return Ranks(dist.get_rank(), dist.get_world_size())


class Ranks:
    """Collectives over all W processes of the default group. Every rank must make the same calls in the same order.

    A collective that fails (a peer died, a time limit passed) leaves the group in an unknown state, so every later
    call raises too.

    Raises:
        PrivacyError: from each method, where communication failed.
    """

    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world
        self.bytes_sent = 0
        self._broken = ""

    @property
    def leader(self) -> bool:
        """Whether this is rank 0, which alone writes files."""
        return self.rank == 0

    def gather(self, words: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """int64 of shape [W, len(words)]: the words of every rank."""
        with self._communicating():
            mine = paddle.to_tensor(list(words), dtype="int64")
            rows: list[Tensor] = []
            dist.all_gather(rows, mine)
            return np.stack([row.numpy() for row in rows])

    def gather_objects(self, value: Any) -> list[Any]:
        """The value of every rank, pickled; for what is rare."""
        with self._communicating():
            values: list[Any] = []
            dist.all_gather_object(values, value)
            return values

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites each tensor by rank 0's."""
        with self._communicating(), paddle.no_grad():
            for tensor in tensors:
                if tensor.size:
                    dist.broadcast(tensor.detach(), src=0)

    def sum_(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over all ranks, in its own dtype; the inputs are consumed. Bitwise equal on all ranks."""
        with self._communicating(), paddle.no_grad():
            summed: list[Tensor] = list(tensors)
            for indices in _buckets(tensors):
                self.bytes_sent += sum(tensors[i].size * tensors[i].element_size() for i in indices)
                if len(indices) == 1:
                    dist.all_reduce(summed[indices[0]])
                    continue
                flat = paddle.concat([tensors[i].reshape([-1]) for i in indices])
                dist.all_reduce(flat)
                for i, part in zip(indices, paddle.split(flat, [tensors[i].size for i in indices])):
                    summed[i] = part.reshape(tensors[i].shape)
            return summed

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        if self._broken:
            raise PrivacyError(self._broken)
        try:
            yield
        except Exception as error:
            self._broken = (
                f"rank {self.rank} of {self.world} lost contact with the other ranks ({_first_line(error)}); no "
                "weights were changed by this step, so end this process and restart all ranks from the last checkpoint"
            )
            raise PrivacyError(self._broken) from error


def _buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the tensors that travel together: one dtype, up to _BUCKET elements, in order; empty ones nowhere."""
    buckets: list[list[int]] = []
    open_bucket: dict[Any, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        size = int(tensor.size)
        if not size:
            continue
        held, elements = open_bucket.get(tensor.dtype, ([], 0))
        if not held or elements + size > _BUCKET:
            held, elements = [], 0
            buckets.append(held)
        held.append(i)
        open_bucket[tensor.dtype] = held, elements + size
    return buckets


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
