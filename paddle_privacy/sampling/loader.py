"""A DataLoader over Poisson batches that says which of them the loop is holding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle.io import DataLoader

from paddle_privacy.errors import PrivacyError
from paddle_privacy.sampling.poisson import PoissonBatchSampler


class PoissonDataLoader(DataLoader):
    """Another loader's data set, collation, workers, shared memory and devices, over Poisson batches.

    It reports each batch to the sampler as the loop receives it, so that a batch that the loop skipped or used twice
    is told apart by identity and not only by its number of rows.

    Args:
        data_loader: the loader to take everything but the batches from. It is not changed.
        sampler: draws from as many rows as its data set has.

    Raises:
        PrivacyError: the loader is of a class that iterates in its own way, which this one would replace, or
            produces its batches without a batch sampler.
        ValueError: data set and sampler differ in size.
    """

    batch_sampler: PoissonBatchSampler

    def __init__(self, data_loader: DataLoader, sampler: PoissonBatchSampler) -> None:
        if type(data_loader).__iter__ not in (DataLoader.__iter__, PoissonDataLoader.__iter__):
            raise PrivacyError(
                f"data_loader is a {type(data_loader).__name__}, which iterates in its own way; pass a plain "
                "paddle.io.DataLoader, or build this one over a PoissonBatchSampler yourself"
            )
        if data_loader.batch_sampler is None:
            raise PrivacyError(
                "data_loader has batch_size=None, so it takes whole items of the data set as batches; build it with a "
                "batch size over a data set whose items are rows"
            )
        rows = len(data_loader.dataset)
        if rows != sampler.num_rows:
            raise ValueError(f"sampler draws from {sampler.num_rows} rows but data_loader's data set has {rows}")
        # Paddle's constructor cannot be asked what it was given, but it keeps all of it.
        self.__dict__.update(data_loader.__dict__)
        self.batch_sampler = sampler
        self.batch_size = None
        self.drop_last = False
        self._iterator = None

    def __iter__(self) -> Any:
        batches = super().__iter__()
        # Read here: the iterator above has just begun the generation that its batches belong to.
        return self._deliver(batches, self.batch_sampler.emissions.generation)

    def _deliver(self, batches: Iterator[Any], generation: int) -> Iterator[Any]:
        try:
            for batch in batches:
                self.batch_sampler.emissions.deliver(generation)
                yield batch
        finally:
            # A loop left early would leave Paddle's reader thread waiting, and its batches in memory, for good.
            batches._exit_thread_expectedly()  # type: ignore[attr-defined]
