"""Prefetch micro-batches: the next step's are collated and copied while an accelerator computes.

A thread collates them and copies them to the device on a stream of its own. On a CPU nothing is
prefetched: collation and training need the same cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from distcore.distributed.devices import UNPINNED
from distcore.engine.loader import each_tensor, one_step, pinned, to_device
from distcore.plugin.strategy.contract import MicroBatch
from distcore.plugin.task.task import Batch

Stream = Iterator[tuple[MicroBatch, Batch]]
Micros = list[tuple[MicroBatch, Batch]]
PATIENCE = 5.0
"""Seconds that the end of a run waits for the thread; a collation that takes longer ends with the
process.
"""


class Prefetcher:
    """Takes the micro-batches of one step after another from a stream, for one device.

    The thread reads data only between ``fetch`` and ``wait``. An evaluation or a save between two
    steps can therefore use the same dataset, files and tokenizer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Stream = iter(())
        # No thread for a device that computes in main memory.
        self._thread: _FetchThread | None = None
        if device.type not in UNPINNED:
            self._thread = _FetchThread(device)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread:
            self._thread.end()

    def follow(self, stream: Stream) -> None:
        """Take the next steps from ``stream``."""
        self.wait()
        self._stream = stream
        if self._thread:
            # What was fetched is a step of the stream before.
            self._thread.fetched = None

    def take(self) -> Micros:
        """Return the next step's micro-batches, on the device; raises their collation's error."""
        if self._thread is None:
            return one_step(self._stream)
        # The first step of a stream is not fetched ahead.
        if self._thread.fetched is None:
            self.fetch()
            self.wait()
        return self._thread.hand_over()

    def fetch(self) -> None:
        """Start to collate and copy the next step."""
        if self._thread:
            self._thread.begin(self._stream)

    def wait(self) -> None:
        """Wait until the step of ``fetch`` is collated, and its copy queued on the device.

        The copy itself may still be under way.
        """
        if self._thread:
            self._thread.wait()


@dataclass(frozen=True, slots=True)
class _FetchedStep:
    """A step whose copy to the device is queued, or the error of its collation."""

    micros: Micros
    copied: torch.Event | None = None
    """Recorded on the device after the last copy."""
    error: BaseException | None = None


class _FetchThread:
    """The thread. It takes one step at a time, each from the stream that ``begin`` passes."""

    def __init__(self, device: torch.device) -> None:
        self.fetched: _FetchedStep | None = None
        """The fetched step, until ``hand_over`` returns it."""
        self._device = device
        self._copy_stream = torch.Stream(device)
        self._is_fetching = False
        # A stream for each step to fetch, and None at the end.
        self._streams: SimpleQueue[Stream | None] = SimpleQueue()
        self._results: SimpleQueue[_FetchedStep] = SimpleQueue()
        # A daemon: a process whose collation hangs can end.
        self._thread = Thread(target=self._serve, name="distcore-prefetch", daemon=True)
        self._thread.start()

    def begin(self, stream: Stream) -> None:
        self._streams.put(stream)
        self._is_fetching = True

    def wait(self) -> None:
        if self._is_fetching:
            self.fetched = self._results.get()
            self._is_fetching = False

    def hand_over(self) -> Micros:
        """Return the fetched step, for use on the current stream of the device."""
        fetched = self.fetched
        assert fetched is not None
        self.fetched = None
        if fetched.error is not None:
            raise fetched.error
        if fetched.copied is not None:
            compute_stream = torch.accelerator.current_stream(self._device)
            compute_stream.wait_event(fetched.copied)
            for _, batch in fetched.micros:
                # Else a later copy could take a tensor's memory while a pass still reads it.
                each_tensor(batch, lambda tensor: _record_use(compute_stream, tensor))
        return fetched.micros

    def end(self) -> None:
        """End the thread, and wait at most ``PATIENCE`` seconds for it."""
        self._streams.put(None)
        self._thread.join(PATIENCE)

    def _serve(self) -> None:
        """Fetch a step for each stream in the queue, until ``end``."""
        for stream in iter(self._streams.get, None):
            self._results.put(self._fetch(stream))

    def _fetch(self, stream: Stream) -> _FetchedStep:
        """Return the next step of a stream, with its copy queued, or with the error that it met."""
        try:
            # Device and stream are settings of a thread.
            torch.accelerator.set_device_index(self._device)
            torch.accelerator.set_stream(self._copy_stream)
            micros: Micros = []
            for micro, batch in one_step(stream):
                pinned_batch = each_tensor(batch, pinned)
                micros.append((micro, to_device(pinned_batch, self._device)))
            copied = self._copy_stream.record_event()
        except BaseException as error:
            # ``hand_over`` raises it, in the main thread.
            return _FetchedStep([], error=error)
        return _FetchedStep(micros, copied)


def _record_use(stream: torch.Stream, tensor: Tensor) -> Tensor:
    """Return ``tensor``; its memory is not used again before ``stream`` has read it."""
    if tensor.layout == torch.strided:
        tensor.record_stream(stream)
    return tensor
