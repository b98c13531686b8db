"""From the sampler's rows to batches on the device, nothing read that is not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch.utils.data import DataLoader

from distcore.config import RunConfig
from distcore.plugin.contract import MicroBatch, Sampler
from distcore.plugin.task import Batch, Dataset


class MicroBatches:
    """A dataset seen through a sampler, as torch's DataLoader wants it: one item is one micro-batch."""

    def __init__(self, dataset: Dataset, sampler: Sampler, config: RunConfig) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.workers = config.loader.workers

    def __getitem__(self, micro: MicroBatch) -> tuple[MicroBatch, Batch]:
        return micro, self.dataset.batch(micro.indices)

    def stream(self, epoch: int, steps: range) -> Iterator[tuple[MicroBatch, Batch]]:
        """The micro-batches of these steps, in order, each with its rows beside it."""
        micros = chain.from_iterable(self.sampler(epoch, step) for step in steps)
        if not self.workers:
            return map(self.__getitem__, micros)
        pin = torch.cuda.is_available()
        return iter(DataLoader(self, sampler=micros, batch_size=None, num_workers=self.workers, pin_memory=pin))  # type: ignore[arg-type]


def one_step(stream: Iterator[tuple[MicroBatch, Batch]]) -> list[tuple[MicroBatch, Batch]]:
    """Take the micro-batches of one optimizer step from ``stream``."""
    taken = []
    for micro, batch in stream:
        taken.append((micro, batch))
        if micro.last:
            break
    return taken


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to the rank's device; the only place where data moves."""
    if device.type == "cpu":
        return batch
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
