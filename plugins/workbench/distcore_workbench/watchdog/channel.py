"""Questions and answers of ranks outside their process group, by its store.

The store is that of their launcher or of rank 0.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from distcore import RankInfo
from distcore_workbench.watchdog.situation import RankState, host_and_pid

T = TypeVar("T")
ROOT = "distcore-watchdog"
"""The beginning of the keys.

Questions have numbers, so that those of an earlier attempt in the same store are not heard.
"""
PATIENCE = 5.0
"""Seconds that the store may take."""
GRACE = 4.0
"""Seconds that ranks have for their answers, on top of the pause between two looks."""
POLL = 0.2
"""Seconds between two looks for answers."""


class SilentStoreError(Exception):
    """The store does not answer, or has gone."""


class EndOrder(NamedTuple):
    """The order to end a run after a hang, which every rank gets."""

    ranks: Sequence[int]
    """The ranks that the others wait for: they end at once."""
    line: str
    """The line about these ranks that the user has read."""
    is_stop: bool
    """Whether a signal asked for it; else the hang is a failure."""


class Channel:
    """A connection of its own to the store, in a thread of its own.

    The connection of the process group may be in use by a rank that waits. Without the thread, a
    store whose process is stopped, and which never answers, would stop this rank, too.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        """Connect. Raises SilentStoreError."""
        # Not in every build of torch.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._info = rank_info
        self._actions: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="distcore-watchdog-store", daemon=True).start()
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        patience = timedelta(seconds=PATIENCE)
        self._store: TCPStore = self._do(
            lambda: TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False)
        )
        self._heard = self._count(f"{ROOT}/asked", 0)
        # An earlier attempt in the same store may have asked ranks to stop.
        self._stops_before = self._count(f"{ROOT}/stops", 0)
        self._do(lambda: self._store.set(f"{ROOT}/process-{rank_info.rank}", host_and_pid()))

    def heard(self) -> int | None:
        """Return the number of a question that this rank has not heard yet."""
        questions = self._count(f"{ROOT}/asked", 0)
        if questions == self._heard:
            return None
        self._heard = questions
        return questions

    def answer(self, number: int, situation: RankState) -> None:
        """Answer a question."""
        self._do(lambda: self._store.set(f"{ROOT}/{number}/{situation.rank}", situation.dumps()))

    def ask(self) -> int | None:
        """Ask all ranks where they are; return the number of the question.

        ``None`` if another rank asks already.
        """
        number = self._heard + 1
        if self._count(f"{ROOT}/asker-{number}", 1) > 1:
            return None
        self._heard = self._count(f"{ROOT}/asked", 1)
        return self._heard

    def tell_stop(self) -> None:
        """Tell the other ranks that this one was asked to stop: it alone may have got a signal."""
        self._count(f"{ROOT}/stops", 1)

    def is_stopping(self) -> bool:
        """Return True if a rank was asked to stop."""
        return self._count(f"{ROOT}/stops", 0) > self._stops_before

    def tell_end(self, order: EndOrder) -> bool:
        """Tell all ranks to end; return False if another rank asks something at this moment."""
        number = self._heard + 1
        if self._count(f"{ROOT}/asker-{number}", 1) > 1:
            return False
        self._do(lambda: self._store.set(f"{ROOT}/{number}/end", json.dumps(order)))
        self._heard = self._count(f"{ROOT}/asked", 1)
        return True

    def end_order(self, number: int) -> EndOrder | None:
        """Return the order with this number; ``None`` if it is a question where ranks are."""
        key = f"{ROOT}/{number}/end"
        if not self._has([key]):
            return None
        text = self._do(lambda: self._store.get(key))
        return EndOrder(*json.loads(text))

    def answers(self, number: int, pause: float) -> dict[int, RankState]:
        """Wait for the answers of the other ranks, and return those that came, by rank.

        The ranks look for questions every ``pause`` seconds.
        """
        other_ranks = [rank for rank in range(self._info.size) if rank != self._info.rank]
        keys = {rank: f"{ROOT}/{number}/{rank}" for rank in other_ranks}
        deadline = time.monotonic() + GRACE + pause
        while not self._has(keys.values()) and time.monotonic() < deadline:
            time.sleep(POLL)
        answered = [rank for rank, key in keys.items() if self._has([key])]
        if not answered:
            return {}
        keys_of_answers = [keys[rank] for rank in answered]
        texts = self._do(lambda: self._store.multi_get(keys_of_answers))
        states = map(RankState.loads, texts)
        return dict(zip(answered, states, strict=True))

    def process_of(self, rank: int) -> str:
        """Return machine and number of a rank's process; empty if it has not connected."""
        key = f"{ROOT}/process-{rank}"
        if not self._has([key]):
            return ""
        return self._do(lambda: self._store.get(key)).decode()

    def _has(self, keys: Collection[str]) -> bool:
        """Return True if the store has all of these keys; it does not wait for them."""
        return self._do(lambda: self._store.check(list(keys)))

    def _count(self, key: str, add: int) -> int:
        """Add to a counter of the store, and return its value; ``add`` of 0 only reads it."""
        return self._do(lambda: self._store.add(key, add))

    def _do(self, action: Callable[[], T]) -> T:
        """Return the result of an action on the store.

        Raises SilentStoreError if the action fails, or takes longer than ``PATIENCE``.
        """
        future: Future[T] = Future()
        self._actions.put((future, action))
        try:
            return future.result(PATIENCE)
        except (TimeoutError, RuntimeError, OSError) as error:
            # torch's DistStoreError is a RuntimeError
            raise SilentStoreError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the thread."""
        self._actions.put(None)

    def _serve(self) -> None:
        """Run the actions in order until ``close``; the body of the thread."""
        while (queued := self._actions.get()) is not None:
            future, action = queued
            try:
                future.set_result(action())
            except Exception as error:  # the thread that asked sees it
                future.set_exception(error)


def open_channel(rank_info: RankInfo) -> Channel | None:
    """Connect the watchdogs of the ranks.

    ``None`` for a single rank, and where no store stays open.
    """
    if rank_info.size < 2:
        return None
    if not is_of_launcher() and not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        return Channel(rank_info)
    except (SilentStoreError, KeyError, ValueError):
        # a group that the program made may have another kind of store
        return None


def is_of_launcher() -> bool:
    """Return True if a launcher's process holds the store, which outlives the ranks.

    Otherwise rank 0's does.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
