"""Recognize ranks that ``horovodrun`` has started. Imports neither torch nor Horovod, since
every command calls it.
"""

from __future__ import annotations

from collections.abc import Mapping

from distcore import ConfigError, RankInfo

NAME = "horovodrun"
VARIABLES = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")


def horovodrun(environ: Mapping[str, str]) -> RankInfo | None:
    """Return the rank info from ``horovodrun``'s variables; ``None`` if it did
    not start this process.

    If RANK and WORLD_SIZE are set too, distcore or torchrun has set up this rank already: ``None``.
    Raises ConfigError for a variable that is not a number.
    """
    if not environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or (
        environ.get("RANK") and environ.get("WORLD_SIZE")
    ):
        return None
    rank, size, local_rank, local_size = (_number(environ, name) for name in VARIABLES)
    return RankInfo(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, launcher=NAME
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not value.isdigit():
        raise ConfigError(
            f"{name}={value!r} in the environment: expected a whole number; start with horovodrun"
            " again"
        )
    return int(value)
