"""A separate store for each strategy of the same ranks: a backend would find the keys
of the previous one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

# public, but not re-exported by name
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from distcore.files import write_atomically
from distcore.plugin.strategy.contract import LOOPBACK, RankInfo


@contextmanager
def store_for(turn: int, folder: Path, rank_info: RankInfo, seconds: float) -> Iterator[None]:
    """Point MASTER_PORT to a store that nobody has used; the environment is as before at the end.

    ``turn`` counts the strategies of this launch. The first takes the launcher's store. For a later
    one rank 0 hosts a store on loopback until every rank has left; the others wait at most
    ``seconds`` for it.
    """
    own_store = _host_store(turn, folder, rank_info, seconds) if turn else nullcontext()
    with environment_kept(), own_store:
        yield


@contextmanager
def environment_kept() -> Iterator[None]:
    """At the end the environment is as before."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _host_store(turn: int, folder: Path, rank_info: RankInfo, seconds: float) -> Iterator[None]:
    """Host a store on rank 0, whose port the others read from ``folder``, until all have left."""
    port = folder / f"store-{turn}"
    files_of_leaving = [folder / f"left-{turn}-{rank}" for rank in range(rank_info.size)]
    store = _host(port) if rank_info.rank == 0 else None
    await_true(port.exists, seconds, "rank 0 opened no store")
    os.environ["MASTER_PORT"] = port.read_text()
    yield
    files_of_leaving[rank_info.rank].touch()

    def have_all_left() -> bool:
        return all(file.exists() for file in files_of_leaving)

    # The store ends with this object: without it, ranks that still leave would fail.
    if store is not None:
        await_true(have_all_left, seconds, "other ranks did not leave")


def _host(port: Path) -> TCPStore:
    """Open a store on loopback, and write its port to file ``port``; torch would
    listen on every interface.
    """
    listener = socket.create_server((LOOPBACK, 0))
    _, number = listener.getsockname()
    # The store owns the socket from here on.
    descriptor = listener.detach()
    store = TCPStore(
        LOOPBACK, number, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    write_atomically(port, str(number))
    return store


def await_true(condition: Callable[[], bool], seconds: float, failure: str) -> None:
    """Wait until ``condition()`` is true. Raises TimeoutError with the
    message ``failure`` after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(failure)
        time.sleep(0.002)
