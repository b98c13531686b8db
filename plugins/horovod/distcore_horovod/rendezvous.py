"""Connect the ranks of any launcher: rank 0 hosts Horovod's rendezvous, and publishes its
port in torch's store.

``horovodrun`` has a rendezvous of its own. Ours is open only until all ranks are connected.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

# public, not re-exported
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from distcore import RankInfo
from distcore.distributed import open_store
from distcore_horovod import rank_environment
from distcore_horovod.library import hvd

LOOPBACK = "127.0.0.1"


def connect(rank_info: RankInfo, timeout: int, *, over_mpi: bool = False) -> None:
    """Connect this rank to the others; every rank must call it.

    ``timeout``: seconds to wait for the last rank.

    With ``over_mpi``, ranks that mpirun has started connect and communicate by MPI.
    """
    with ExitStack() as stack:
        if not over_mpi and rank_info.launcher != rank_environment.NAME:
            os.environ.update(rank_variables(rank_info))
            if rank_info.size > 1:
                os.environ.update(stack.enter_context(rendezvous(rank_info, timeout)))
        hvd.init()
        hvd.barrier()  # all ranks are connected: the rendezvous can be closed


def rank_variables(rank_info: RankInfo) -> dict[str, str]:
    """Return Horovod's variables for this rank.

    They also choose gloo, whatever else Horovod was built with.
    """
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
    """Return the network interface: loopback on one machine, else GLOO_SOCKET_IFNAME,
    else Horovod's own choice.
    """
    interfaces = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    chosen = (
        loopback if rank_info.local_size == rank_info.size else os.environ.get("GLOO_SOCKET_IFNAME")
    )
    return {"HOROVOD_GLOO_IFACE": chosen} if chosen else {}


@contextmanager
def rendezvous(rank_info: RankInfo, timeout: int) -> Iterator[dict[str, str]]:
    """Wait for all ranks, then yield the variables with the address of rank 0's rendezvous,
    which is open meanwhile.

    The wait comes first, because Horovod aborts a process if one of its peers is 30 seconds late.
    ``timeout`` is in seconds.
    """
    # After a restart the store may still hold keys of the previous ranks.
    store = PrefixStore(
        f"horovod-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", open_store(rank_info)
    )
    store.set_timeout(timedelta(seconds=timeout))
    with ExitStack() as stack:
        port = stack.enter_context(_server(rank_info)) if rank_info.rank == 0 else None
        agreed = _wait_for_all(store, rank_info.size, port)
        one_machine = rank_info.local_size == rank_info.size
        yield {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK if one_machine else str(rank_info.master_addr),
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(agreed),
        }


def _wait_for_all(store: Store, size: int, port: int | None) -> int:
    """Wait until all ``size`` ranks have arrived; return the port that rank 0 gave.

    Works again in the same store.
    """
    count = store.add("arrivals", 1)
    turn = (count - 1) // size  # number of earlier meetings in this store
    if port is not None:
        store.set(f"port-{turn}", str(port))
    if count % size == 0:
        store.set(f"complete-{turn}", "")
    store.wait([f"complete-{turn}"])
    return int(store.get(f"port-{turn}"))


@contextmanager
def _server(rank_info: RankInfo) -> Iterator[int]:
    """Serve the rendezvous in a thread, on loopback if all ranks are on this
    machine; yield its port.
    """
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
