"""How ranks of any launcher find each other: rank 0 hosts Horovod's rendezvous, torch's store tells its port.

``horovodrun`` does all that itself. Elsewhere the rendezvous lives only until the ranks are connected.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not re-exported

from distcore import RankInfo, open_store
from distcore_horovod import launcher
from distcore_horovod.library import hvd

LOOPBACK = "127.0.0.1"


def connect(rank_info: RankInfo, timeout: int, *, over_mpi: bool = False) -> None:
    """Connect this rank to the others; every rank calls. ``timeout`` in seconds bounds the wait for the last one.

    With ``over_mpi``, ranks that mpirun has started find each other and talk by MPI.
    """
    with ExitStack() as stack:
        if not over_mpi and rank_info.launcher != launcher.NAME:
            os.environ.update(rank_variables(rank_info))
            if rank_info.size > 1:
                os.environ.update(stack.enter_context(rendezvous(rank_info, timeout)))
        hvd.init()
        hvd.barrier()  # all ranks have found each other: nobody needs the rendezvous any more


def rank_variables(rank_info: RankInfo) -> dict[str, str]:
    """What Horovod reads of this rank's place, and that it shall take gloo, whatever else it was built with."""
    variables = {
        "HOROVOD_RANK": rank_info.rank,
        "HOROVOD_SIZE": rank_info.size,
        "HOROVOD_LOCAL_RANK": rank_info.local_rank,
        "HOROVOD_LOCAL_SIZE": rank_info.local_size,
        "HOROVOD_HOSTNAME": socket.gethostname(),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    return {name: str(value) for name, value in variables.items()} | _interface(rank_info)


def _interface(rank_info: RankInfo) -> dict[str, str]:
    """The network to talk over: loopback on one machine, else what the user named for gloo, or Horovod's choice."""
    found = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in found), None)
    chosen = loopback if rank_info.local_size == rank_info.size else os.environ.get("GLOO_SOCKET_IFNAME")
    return {"HOROVOD_GLOO_IFACE": chosen} if chosen else {}


@contextmanager
def rendezvous(rank_info: RankInfo, timeout: int) -> Iterator[dict[str, str]]:
    """Meet all ranks, and give the variables that say where rank 0's rendezvous listens while the context lasts.

    They meet first, because Horovod aborts the process where a peer is 30 seconds late.
    """
    store = PrefixStore(f"horovod-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", open_store(rank_info))
    store.set_timeout(timedelta(seconds=timeout))
    with ExitStack() as stack:
        port = stack.enter_context(_server(rank_info)) if rank_info.rank == 0 else None
        met = _meet(store, rank_info.size, port)
        one_machine = rank_info.local_size == rank_info.size
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK if one_machine else str(rank_info.master_addr),
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(met),
        }


def _meet(store: Store, size: int, port: int | None) -> int:
    """Wait until all ranks are here; return the port that rank 0 brought. Ranks may meet again in the same store."""
    count = store.add("arrivals", 1)
    meeting = (count - 1) // size
    if port is not None:
        store.set(f"port-{meeting}", str(port))
    if count % size == 0:
        store.set(f"complete-{meeting}", "")
    store.wait([f"complete-{meeting}"])
    return int(store.get(f"port-{meeting}"))


@contextmanager
def _server(rank_info: RankInfo) -> Iterator[int]:
    """Serve the rendezvous in a thread, on loopback where all ranks are on this machine; give its port."""
    address = LOOPBACK if rank_info.local_size == rank_info.size else ""
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, verbose=0)
    server.init([])
    thread = threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
