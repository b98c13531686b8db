"""From the sampler's rows to batches on the device. Only rows that are trained on are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch.utils.data import DataLoader

from distcore.config import RunConfig
from distcore.plugin.contract import MicroBatch, Sampler
from distcore.plugin.task import Batch, Dataset


class MicroBatches:
    """The micro-batches of a dataset, in the form that torch's DataLoader expects: one item is one micro-batch."""

    def __init__(self, dataset: Dataset, sampler: Sampler, config: RunConfig) -> None:
        """Of ``config`` only ``loader.workers`` is used."""
        self.dataset = dataset
        self.sampler = sampler
        self.workers = config.loader.workers

    def __getitem__(self, micro: MicroBatch) -> tuple[MicroBatch, Batch]:
        return micro, self.dataset.batch(micro.indices)

    def stream(self, epoch: int, steps: range) -> Iterator[tuple[MicroBatch, Batch]]:
        """Yield the micro-batches of these steps in order: the row numbers, and the collated batch on the CPU."""
        micros = chain.from_iterable(self.sampler(epoch, step) for step in steps)
        if not self.workers:
            return map(self.__getitem__, micros)
        pin = torch.cuda.is_available()  # pinned memory lets to_device copy while the GPU computes
        return iter(DataLoader(self, sampler=micros, batch_size=None, num_workers=self.workers, pin_memory=pin))  # type: ignore[arg-type]


def one_step(stream: Iterator[tuple[MicroBatch, Batch]]) -> list[tuple[MicroBatch, Batch]]:
    """Take the micro-batches of the next optimizer step from ``stream``."""
    taken = []
    for micro, batch in stream:
        taken.append((micro, batch))
        if micro.last:
            break
    return taken


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the rank's device; nothing else in the core moves data."""
    if device.type == "cpu":
        return batch
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
