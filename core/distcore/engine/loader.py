"""From the sampler's rows to batches on the device. No other rows are read."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader

from distcore.config import RunConfig
from distcore.distributed.devices import UNPINNED
from distcore.errors import TaskError, raised_at
from distcore.launchers.processes.failures import one_line
from distcore.plugin.strategy.contract import MicroBatch, Run, Sampler
from distcore.plugin.task.task import Batch, Dataset

BY_VALUE = 2**18
"""Largest tensor, in bytes, that is faster sent by value than as shared memory.

Measured by benchmarks/stream_peers.py.
"""


class MicroBatches:
    """The micro-batches of a dataset as torch's DataLoader expects them: one item each."""

    def __init__(self, dataset: Dataset, sampler: Sampler, config: RunConfig) -> None:
        """Of ``config`` only ``loader.workers`` and ``device`` are used."""
        self.dataset = dataset
        self.sampler = sampler
        self.workers = config.loader.workers
        self.pin = config.device not in UNPINNED
        self._is_checked = False

    def __getitem__(self, micro: MicroBatch) -> Loaded | Failed:
        """Return a micro-batch, or what is wrong with it: see ``Failed``."""
        try:
            loaded = Loaded(*next(batches_of(self.dataset, [micro])))
            if not self._is_checked:  # in this loader process
                _check_travels(loaded)
        except TaskError as error:
            return Failed(str(error))
        except Exception as error:  # any class: the code of the dataset
            cause = one_line(f"{type(error).__name__}: {error}")
            return Failed(f"in a loader process: {cause}{raised_at(error)}", traceback.format_exc())
        self._is_checked = True
        return loaded

    def stream(self, epoch: int, steps: range) -> Iterator[tuple[MicroBatch, Batch]]:
        """Yield the micro-batches of these steps in order: row numbers, and batch on the CPU."""
        micros = chain.from_iterable(self.sampler(epoch, step) for step in steps)
        if not self.workers:
            return batches_of(self.dataset, micros)
        loader: DataLoader[Loaded | Failed] = DataLoader(
            self,  # type: ignore[arg-type]
            sampler=micros,
            batch_size=None,
            num_workers=self.workers,
            worker_init_fn=send_by_value,
            pin_memory=self.pin,  # lets to_device copy while the device computes
        )
        return map(_taken, loader)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A micro-batch from a loader process.

    DataLoader leaves a class of ours alone. It would turn a tuple into a list, and arrays into
    tensors.
    """

    micro: MicroBatch
    """The row numbers."""
    batch: Batch
    """The collated rows."""

    def pin_memory(self) -> Loaded:
        """Return the micro-batch with all tensors in pinned memory; DataLoader calls this."""
        return Loaded(self.micro, each_tensor(self.batch, pinned))


@dataclass(frozen=True, slots=True)
class Failed:
    """The error of a loader process, in place of a micro-batch.

    An exception would come with two processes' tracebacks.
    """

    line: str
    """The error, one line."""
    traceback: str = ""
    """Traceback in the loader process; empty for an error that its line explains."""


def _taken(loaded: Loaded | Failed) -> tuple[MicroBatch, Batch]:
    """Return the micro-batch that a loader process has sent.

    Raises TaskError, or RuntimeError with the traceback of the loader process as a note.
    """
    if not isinstance(loaded, Failed):
        return loaded.micro, loaded.batch
    if not loaded.traceback:
        raise TaskError(loaded.line)
    error = RuntimeError(loaded.line)
    # A note, for the file with the traceback: the line on the screen has no room for it.
    error.add_note(loaded.traceback)
    raise error


def batches_of(
    dataset: Dataset, micros: Iterable[MicroBatch]
) -> Iterator[tuple[MicroBatch, Batch]]:
    """Yield each micro-batch with its collated rows.

    Raises TaskError for a StopIteration of the dataset, which would end the stream, not the run.
    """
    for micro in micros:
        try:
            batch = dataset.batch(micro.indices)
        except StopIteration as error:
            rows = micro.indices[:3].tolist()
            raise TaskError(
                f"dataset: batch() raised StopIteration for rows {rows} …{raised_at(error)}"
            ) from error
        yield micro, batch


def _check_travels(loaded: Loaded) -> None:
    """Raise TaskError for a batch that no process can send: training would wait for it for ever."""
    try:
        # Without the tensors, which torch can send, and which would be copied to shared
        # memory for nothing.
        ForkingPickler.dumps(each_tensor(loaded.batch, lambda _tensor: None))
    except Exception as error:  # any class: pickling calls the code of the user's own classes
        reason = one_line(f"{type(error).__name__}: {error}", limit=200)
        raise TaskError(
            f"dataset: a loader process cannot send its batch ({reason}): define its classes at the"
            " top of a module, or --set loader.workers=0"
        ) from error


def pinned(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in pinned memory, if possible: its copy then overlaps with computation."""
    on_cpu = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_nested
    return tensor.pin_memory() if on_cpu else tensor


def send_by_value(_: int) -> None:
    """Let a loader process send small tensors through its pipe."""
    ForkingPickler.register(Tensor, _sent)


def _sent(tensor: Tensor) -> Any:
    """Return how the pickler of a loader process sends a tensor: by value, if it is small."""
    with suppress(TypeError, RuntimeError):  # of types and layouts that numpy has not
        if tensor.nbytes <= BY_VALUE:
            return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def one_step(stream: Iterator[tuple[MicroBatch, Batch]]) -> list[tuple[MicroBatch, Batch]]:
    """Take the micro-batches of the next optimizer step from ``stream``."""
    micros = []
    for micro, batch in stream:
        micros.append((micro, batch))
        if micro.last:
            break
    return micros


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on the rank's device; nothing else in the core moves data."""
    if device.type == "cpu":
        return batch
    return each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))


def on_device(run: Run, batch: Batch, training: bool = True) -> Batch:
    """Return a batch on the rank's device, with the outputs of the task's frozen models."""
    batch = to_device(batch, run.world.device)
    return run.consult(batch, training) if run.consult else batch


def each_tensor(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    """Return a nesting of mappings, lists and tuples with ``change`` applied to each tensor."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):  # the class of transformers' BatchEncoding is kept, too
        changed: Batch = copy(batch)
        for name, value in batch.items():
            changed[name] = each_tensor(value, change)
        return changed
    if isinstance(batch, (list, tuple)):
        values = (each_tensor(value, change) for value in batch)
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
