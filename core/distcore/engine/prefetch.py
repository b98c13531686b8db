"""The micro-batches of one step after another; on an accelerator the next step's are made ready during the present one.

There a thread collates them and copies them to the device, on a stream of its own, while the device computes. On the
CPU nothing would be gained: collation and training need the same cores.
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
"""Seconds that a run which fails waits for the thread; what collates longer is left to the end of the process."""


class Ahead:
    """Takes steps from a stream, in its order, for one device.

    The thread reads data only between ``fetch`` and ``wait``, so that an evaluation or a save between two steps finds
    the dataset, its files and its tokenizer unused.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Stream = iter(())
        self._thread = None if device.type in UNPINNED else _Fetcher(device)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread:
            self._thread.end()

    def follow(self, stream: Stream) -> None:
        """Take the next steps from ``stream``."""
        self.wait()
        self._stream = stream
        if self._thread:
            self._thread.fetched = None

    def take(self) -> Micros:
        """Return the micro-batches of the next step, on the device; raises what their collation raised."""
        if self._thread is None:
            return one_step(self._stream)
        if self._thread.fetched is None:
            self.fetch()
            self.wait()
        return self._thread.hand_over()

    def fetch(self) -> None:
        """Begin to make the step after this one ready."""
        if self._thread:
            self._thread.begin(self._stream)

    def wait(self) -> None:
        """Wait until what ``fetch`` began is collated, and its copy is under way; not for the device."""
        if self._thread:
            self._thread.wait()


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A step that is on its way to the device, or the error of its collation."""

    micros: Micros
    copied: torch.Event | None = None
    """Happens on the device when all is copied."""
    error: BaseException | None = None


class _Fetcher:
    """The thread. It is given one stream at a time to take a step from, and nothing while it works."""

    def __init__(self, device: torch.device) -> None:
        self.fetched: _Fetched | None = None
        """What was fetched and not handed over yet."""
        self._device, self._aside = device, torch.Stream(device)
        self._begun = False
        self._streams: SimpleQueue[Stream | None] = SimpleQueue()
        self._answers: SimpleQueue[_Fetched] = SimpleQueue()
        # A daemon: a process whose collation hangs can end.
        self._thread = Thread(target=self._serve, name="distcore-ahead", daemon=True)
        self._thread.start()

    def begin(self, stream: Stream) -> None:
        self._streams.put(stream)
        self._begun = True

    def wait(self) -> None:
        if self._begun:
            self.fetched, self._begun = self._answers.get(), False

    def hand_over(self) -> Micros:
        """Return the step that was fetched, for use on the current stream of the device."""
        fetched, self.fetched = self.fetched, None
        assert fetched is not None
        if fetched.error is not None:
            raise fetched.error
        if fetched.copied is not None:
            computes = torch.accelerator.current_stream(self._device)
            computes.wait_event(fetched.copied)
            for _, batch in fetched.micros:
                each_tensor(batch, lambda tensor: _used_on(computes, tensor))
        return fetched.micros

    def end(self) -> None:
        """Have the thread end, and wait for it for a while."""
        self._streams.put(None)
        self._thread.join(PATIENCE)

    def _serve(self) -> None:
        while (stream := self._streams.get()) is not None:
            self._answers.put(self._fetch(stream))

    def _fetch(self, stream: Stream) -> _Fetched:
        try:
            torch.accelerator.set_device_index(self._device)  # of this thread, as is its stream
            torch.accelerator.set_stream(self._aside)
            micros = [(micro, to_device(each_tensor(batch, pinned), self._device)) for micro, batch in one_step(stream)]
            copied = self._aside.record_event()
        except BaseException as error:  # raised again where the step is taken
            return _Fetched([], error=error)
        return _Fetched(micros, copied)


def _used_on(stream: torch.Stream, tensor: Tensor) -> Tensor:
    """Keep the memory of ``tensor``, which is another stream's, from new use before ``stream`` is done with it."""
    if tensor.layout == torch.strided:
        tensor.record_stream(stream)
    return tensor
