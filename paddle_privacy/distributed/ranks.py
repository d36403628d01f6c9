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
        # Bytes of tensors that collectives carried; an all-reduce counts twice, as the reduce and the broadcast it is.
        self.bytes_moved = 0
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

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrites each tensor by that of rank `source`."""
        with self._communicating(), paddle.no_grad():
            for tensor in tensors:
                if tensor.size:
                    dist.broadcast(tensor.detach(), src=source)

    def sum_(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over all ranks, in its own dtype; the inputs are consumed. Bitwise equal on all ranks."""
        with self._communicating(), paddle.no_grad():
            summed: list[Tensor] = list(tensors)
            for indices in _buckets(tensors):
                flat = _flat([tensors[i] for i in indices])
                self.bytes_moved += 2 * _bytes(flat)
                dist.all_reduce(flat)
                for i, part in zip(indices, _parts(flat, [tensors[i] for i in indices])):
                    summed[i] = part
            return summed

    def sum_on_owners(self, tensors: list[Tensor | None], owners: Sequence[int]) -> list[Tensor | None]:
        """Each tensor summed over all ranks, on its owner; None in its place on the others.

        Args:
            tensors: the list is emptied as the sums are sent, so that their memory is free for what follows.
            owners: for each tensor, the rank that gets its sum.
        """
        with self._communicating(), paddle.no_grad():
            summed: list[Tensor | None] = [None] * len(tensors)
            for indices in _buckets(tensors, owners):
                taken = [tensor for i in indices if (tensor := tensors[i]) is not None]
                flat, owner = _flat(taken), owners[indices[0]]
                for i in indices:
                    tensors[i] = None
                self.bytes_moved += _bytes(flat)
                # gloo leaves partial sums in the buffers of ranks that do not own it: they are not read, and dropped.
                dist.reduce(flat, dst=owner)
                if owner == self.rank:
                    for i, part in zip(indices, _parts(flat, taken)):
                        summed[i] = part
                del flat, taken
            return summed

    def from_owners(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> list[Tensor | None]:
        """The value that each tensor has on its owner, on all other ranks; None on the owner. No tensor is written."""
        with self._communicating(), paddle.no_grad():
            received: list[Tensor | None] = [None] * len(tensors)
            for indices in _buckets(tensors, owners):
                members, owner = [tensors[i] for i in indices], owners[indices[0]]
                # A buffer of its own: a broadcast that fails halfway must not have written to the caller's tensors.
                if owner == self.rank:
                    flat = paddle.concat([tensor.detach().reshape([-1]) for tensor in members])
                else:
                    flat = paddle.empty([sum(int(tensor.size) for tensor in members)], dtype=members[0].dtype)
                self.bytes_moved += _bytes(flat)
                dist.broadcast(flat, src=owner)
                if owner != self.rank:
                    for i, part in zip(indices, _parts(flat, members)):
                        received[i] = part
            return received

    def abandon(self, why: str) -> None:
        """This rank cannot go on with what all ranks are in the middle of; every later call raises `why`."""
        self._broken = self._broken or why

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


def _buckets(tensors: Sequence[Tensor | None], owners: Sequence[int] | None = None) -> list[list[int]]:
    """Indices of the tensors that travel together: of one dtype and owner, up to _BUCKET elements, in order.

    Those without elements travel nowhere.
    """
    buckets: list[list[int]] = []
    open_bucket: dict[Any, tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        size = 0 if tensor is None else int(tensor.size)
        if tensor is None or not size:
            continue
        kind = tensor.dtype, None if owners is None else owners[i]
        held, elements = open_bucket.get(kind, ([], 0))
        if not held or elements + size > _BUCKET:
            held, elements = [], 0
            buckets.append(held)
        held.append(i)
        open_bucket[kind] = held, elements + size
    return buckets


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor of all their elements; a single one comes back as it is, without a copy."""
    return tensors[0] if len(tensors) == 1 else paddle.concat([tensor.reshape([-1]) for tensor in tensors])


def _parts(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`flat` cut into pieces of the tensors' shapes."""
    pieces = [flat] if len(tensors) == 1 else paddle.split(flat, [int(tensor.size) for tensor in tensors])
    return [piece.reshape(tensor.shape) for piece, tensor in zip(pieces, tensors)]


def _bytes(tensor: Tensor) -> int:
    return int(tensor.size) * tensor.element_size()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
