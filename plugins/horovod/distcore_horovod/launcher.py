"""Joining ranks that ``horovodrun`` has started. Imports neither torch nor Horovod: every command asks."""

from __future__ import annotations

from collections.abc import Mapping

from distcore import ConfigError, RankInfo

NAME = "horovodrun"
NUMBERS = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")


def horovodrun(environ: Mapping[str, str]) -> RankInfo | None:
    """Return the place that ``horovodrun`` gave this process, or ``None`` where it did not start it.

    RANK and WORLD_SIZE beside its variables mean that somebody has joined already: distcore, or torchrun.
    """
    if not environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or (environ.get("RANK") and environ.get("WORLD_SIZE")):
        return None
    rank, size, local_rank, local_size = (_number(environ, name) for name in NUMBERS)
    return RankInfo(rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher=NAME)


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value.isdigit():
        raise ConfigError(f"{name}={value!r} in the environment: expected a whole number; start with horovodrun again")
    return int(value)
