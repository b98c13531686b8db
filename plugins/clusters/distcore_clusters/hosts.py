"""The hostfile, and the choice of machines and GPUs in it by ``--include`` and ``--exclude``."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distcore import ConfigError, nearest
from distcore.launchers import Host


def hosts_of(given: Mapping[str, Any], nproc: int | None) -> tuple[Host, ...] | None:
    """Return the machines that ``hostfile``, ``include`` and ``exclude`` in ``given`` choose.

    ``nproc`` is the default of slots. Without a hostfile, a ``launcher`` that starts ranks here
    chooses among the accelerators of this machine; others ask their engine, and the answer is
    ``None``. Raises ConfigError.
    """
    include = given.get("include", "")
    exclude = given.get("exclude", "")
    if "hostfile" in given:
        return choose(read_hostfile(given["hostfile"], nproc), include, exclude)
    if given["launcher"].partition(":")[0] not in ("local", "torchrun"):
        return None
    from distcore.distributed import count_accelerators  # slow to import

    machine, _, listed = f"{include}{exclude}".partition(":")
    # Without accelerators and --nproc, there are as many slots as the flags name.
    highest_slot = max(map(int, re.findall(r"\d+", listed)), default=0)
    slots = count_accelerators() or nproc or highest_slot + 1
    names = ["localhost", socket.gethostname()]
    host = Host(name=machine if machine in names else names[0], slots=slots)
    return choose((host,), include, exclude)


def read_hostfile(file: str, nproc: int | None) -> tuple[Host, ...]:
    """Return the machines of a hostfile, which has lines of ``NAME slots=N``.

    ``nproc`` is the default of slots. Empty lines and comments after ``#`` are skipped. Raises
    ConfigError, one line, with file and line number.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise ConfigError(f"--hostfile {file}: {reason}") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host_of(words, f"--hostfile {file}, line {number}", nproc)
        if host.name in hosts:
            raise ConfigError(f"--hostfile {file}, line {number}: {host.name} is listed twice")
        hosts[host.name] = host
    if not hosts:
        raise ConfigError(
            f"--hostfile {file}: names no machine; expected lines such as: host0 slots=4"
        )
    return tuple(hosts.values())


def _host_of(words: list[str], where: str, nproc: int | None) -> Host:
    """Return the machine of one line; ``where`` begins an error."""
    name, *rest = words
    if not rest and nproc is not None:
        return Host(name=name, slots=nproc)
    slots = re.fullmatch(r"slots=([1-9]\d*)", " ".join(rest))
    if slots is None:
        problem = f"{' '.join(rest)!r}" if rest else "no slots, and there is no --nproc"
        raise ConfigError(
            f"{where}: {name} has {problem}; expected: {name} slots=N, the number of ranks"
        )
    return Host(name=name, slots=int(slots[1]))


def choose(hosts: tuple[Host, ...], include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Return the chosen machines and slots, in the order of ``include``.

    ``host0:0,2@host1`` means slots 0 and 2 of one machine, and all slots of another. Raises
    ConfigError for an unknown machine or slot, and if nothing is left.
    """
    if include and exclude:
        raise ConfigError("--include and --exclude: give one of them")
    hosts_by_name = {host.name: host for host in hosts}
    flag = "--include" if include else "--exclude"
    named = _parse(include or exclude, hosts_by_name, flag)
    if include:
        chosen = [_with(hosts_by_name[name], slots) for name, slots in named.items()]
    else:
        chosen = []
        for host in hosts:
            if host.name in named:
                host = _with(host, _without(host, named[host.name]))
            chosen.append(host)
    with_slots = tuple(host for host in chosen if host.slots)
    if not with_slots:
        raise ConfigError(f"--exclude {exclude}: leaves no machine")
    return with_slots


def _parse(text: str, hosts: dict[str, Host], flag: str) -> dict[str, tuple[int, ...] | None]:
    """Return the slots of each machine that ``text`` names, ``None`` for all of them.

    ``hosts`` are the machines that there are, by name.
    """
    named: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@") if text else ():
        name, colon, listed = part.strip().partition(":")
        if name not in hosts:
            machines = ", ".join(hosts)
            raise ConfigError(
                f"{flag} {text}: no machine {name!r}{nearest(name, hosts)} (machines: {machines})"
            )
        if name in named:
            raise ConfigError(f"{flag} {text}: {name} is listed twice")
        named[name] = _slots(listed, hosts[name], f"{flag} {text}") if colon else None
    return named


def _slots(listed: str, host: Host, where: str) -> tuple[int, ...]:
    """Return the numbers of slots in a list such as ``0,2``; raises ConfigError for others."""
    numbers = [word.strip() for word in listed.split(",")]
    if not all(number.isdigit() for number in numbers):
        raise ConfigError(f"{where}: {listed!r}: expected numbers of slots, as in {host.name}:0,2")
    slots = tuple(map(int, numbers))
    for slot in slots:
        if slot >= host.slots:
            raise ConfigError(
                f"{where}: {host.name} has {host.slots} slot(s), 0 to {host.slots - 1}, and no"
                f" slot {slot}"
            )
    if len(set(slots)) < len(slots):
        raise ConfigError(f"{where}: a slot of {host.name} is listed twice")
    return slots


def _without(host: Host, slots: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the slots of a machine but ``slots``; none but all of them for ``None``."""
    if slots is None:
        return ()
    return tuple(slot for slot in range(host.slots) if slot not in slots)


def _with(host: Host, slots: tuple[int, ...] | None) -> Host:
    """Return the machine with the chosen ``slots``, or all of its own for ``None``."""
    return host if slots is None else replace(host, slots=len(slots), chosen=slots)
