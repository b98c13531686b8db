"""The addresses and interfaces by which a machine reaches another one; checks that names resolve
and ports are free.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

from distcore.errors import ConfigError
from distcore.plugin.strategy.contract import RankInfo

PATIENCE = 20.0
"""Seconds for a name to resolve: that of a pod appears some seconds after the pod."""
ELSEWHERE = "192.0.2.1"
"""An address that no machine has, as it is kept for documents."""


def address_toward(host: str) -> str | None:
    """Return this machine's address toward ``host``; ``None`` without a route. Sends nothing.

    If ``host`` is a name of this machine with a loopback address, as on a fresh Debian, return the
    address toward other machines.
    """
    address = _route_to(host)
    if address and is_loopback(address) and host != "localhost" and not is_loopback(host):
        return _address_abroad() or address
    return address


def is_here(host: str) -> bool:
    """Return True if ``host``, a name or an address, is this machine."""
    return any(is_loopback(address) or interface_of(address) for address in _addresses_of(host))


def is_loopback(address: str) -> bool:
    """Return True for a loopback address; False for a name."""
    try:
        return ip_address(address.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


def interface_of(address: str) -> str | None:
    """Return the name of this machine's interface that has ``address``."""
    return next(
        (
            name
            for name, addresses in _interfaces().items()
            if address in {a.address for a in addresses}
        ),
        None,
    )


def spans_machines(rank_info: RankInfo) -> bool:
    """Return True if the ranks are on several machines."""
    return rank_info.local_size < rank_info.size


def where(rank_info: RankInfo) -> str:
    """Return host and address of this rank and of rank 0, for messages; empty if all ranks
    are on one machine.
    """
    if not spans_machines(rank_info):
        return ""
    master = rank_info.master_addr or "its address"
    mine = address_toward(master) or "no address toward rank 0"
    return f"{socket.gethostname()} ({mine}; rank 0 at {master}:{rank_info.master_port})"


def prepare_network(rank_info: RankInfo, patience: float = PATIENCE) -> None:
    """Wait until the name of rank 0's machine resolves, and give gloo an interface that reaches it.

    gloo uses the address of this machine's own name. If the name has a loopback address, as on a
    fresh Debian, or no address, other machines cannot reach it. GLOO_SOCKET_IFNAME is then set,
    unless the user has set it.

    Raises ConfigError, one line, for a name that does not resolve within ``patience`` seconds.
    """
    if not spans_machines(rank_info) or not rank_info.master_addr:
        return
    deadline = time.monotonic() + patience
    while not _addresses_of(rank_info.master_addr):
        if time.monotonic() >= deadline:
            name = rank_info.master_addr
            here = socket.gethostname()
            raise ConfigError(
                f"{rank_info.launcher}: rank 0's machine is {name!r}, a name for which {here} finds"
                " no address; export MASTER_ADDR, the address of that machine, to all ranks"
            )
        time.sleep(0.2)
    own = _addresses_of(socket.gethostname())
    if "GLOO_SOCKET_IFNAME" in os.environ or (own and not all(map(is_loopback, own))):
        return
    address = address_toward(rank_info.master_addr)
    if interface := interface_of(address) if address else None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


@contextmanager
def port_for_ranks(port: int | str | None, instead: str) -> Iterator[None]:
    """Turn the error of a port that another program listens on into a ConfigError; ``instead``
    says what to choose.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's DistNetworkError is a RuntimeError
        if getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error):
            raise ConfigError(
                f"port {port} is used by {_listener(int(port or 0))}; choose another {instead}"
            ) from None
        raise


def _listener(port: int) -> str:
    """Return the name of the program that uses a port of this machine."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
        at_port = [each for each in connections if each.laddr and each.laddr.port == port]
        pids = [each.pid for each in at_port if each.pid]
        return f"{psutil.Process(pids[0]).name()} (process {pids[0]})"
    except (psutil.Error, OSError, IndexError):  # of another user, or gone
        return "another program"


def _route_to(host: str) -> str | None:
    """Return the address from which this machine reaches ``host``; ``None`` if it cannot be told.

    Connecting a datagram socket sends nothing.
    """
    discard_port = 9
    try:
        answers = socket.getaddrinfo(host.strip("[]"), discard_port, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = answers[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _address_abroad() -> str | None:
    """Return the address by which other machines reach this one; ``None`` if it has none.

    It is one of the interface that the user has chosen for gloo, or else of the default route.
    """
    interfaces = _interfaces()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen in interfaces:
        interfaces = {chosen: interfaces[chosen]}
    else:
        address_of_route = _route_to(ELSEWHERE)
        if address_of_route:
            return address_of_route
    for addresses in interfaces.values():
        for each in addresses:
            if each.family == socket.AF_INET and not is_loopback(each.address):
                return str(each.address)
    return None


def _addresses_of(name: str) -> set[str]:
    """Return the addresses of a machine by its name; none if it is not known here."""
    try:
        answers = socket.getaddrinfo(name.strip("[]"), None)
    except OSError:
        return set()
    return {str(address[0]) for *_, address in answers}


def _interfaces() -> Mapping[str, list[Any]]:
    import psutil

    return psutil.net_if_addrs()
