"""The request for a plan, and the config of each row; ranks and devices need not
exist on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from distcore import Capabilities, ConfigError, DistcoreError, RunConfig, load_config, with_changes
from distcore.cli import JobRequest
from distcore.distributed import resolve_device
from distcore.lab import Resolved, resolve, strategies
from distcore.registry import offers

MOST_RANKS = 1024
"""Most ranks that a plan is for."""
LOCAL = "LOCAL_WORLD_SIZE"
"""The variable by which a launcher tells strategies how many ranks a machine has."""


class Ranks(NamedTuple):
    """How many ranks share the work, and where they are."""

    ranks: int
    """All of them."""
    nodes: int
    """Machines that they are on, with equally many on each."""

    def __str__(self) -> str:
        return (
            str(self.ranks)
            if self.nodes == 1
            else f"{self.ranks} ({self.nodes} × {self.ranks // self.nodes})"
        )

    @contextmanager
    def set_local_world_size(self) -> Iterator[None]:
        """Tell strategies how many ranks each machine has, as a launcher does."""
        before = os.environ.get(LOCAL)
        os.environ[LOCAL] = str(self.ranks // self.nodes)
        try:
            yield
        finally:
            os.environ.pop(LOCAL)
            if before is not None:
                os.environ[LOCAL] = before


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest(JobRequest):
    """The flags of ``distcore plan``."""

    strategies: str
    """Strategies, separated by commas; empty: the config's."""
    ranks: Sequence[int]
    """Numbers of ranks to plan for, on each machine."""
    nodes: Sequence[int] = (1,)
    """Numbers of machines to plan for."""
    elsewhere: bool = False
    """Whether the device may be one that this machine lacks."""

    def all_ranks(self) -> list[Ranks]:
        """Return the machines and ranks to plan for; raises ConfigError, one line,
        for more than ``MOST_RANKS``.
        """
        if min(self.nodes) < 1:
            raise ConfigError(f"--nodes {min(self.nodes)}: must be at least 1")
        for nodes, ranks in product(self.nodes, self.ranks):
            if not 1 <= nodes * ranks <= MOST_RANKS:
                on_nodes = "" if nodes == 1 else f" on each of --nodes {nodes}"
                raise ConfigError(
                    f"--nproc {ranks}{on_nodes}: a plan is for 1 to {MOST_RANKS} ranks"
                )
        return list(
            dict.fromkeys(
                Ranks(nodes * ranks, nodes) for nodes, ranks in product(self.nodes, self.ranks)
            )
        )


def _load(request: PlanRequest, strategy: str) -> RunConfig:
    """Return the config with another strategy, without the options of the file's own one."""
    strategy_of_job, _, _ = request.load().strategy.partition(":")
    name, _, _ = strategy.partition(":")
    changes: dict[str, Any] = dict(request.changes)
    if name != strategy_of_job:
        for key in request.changes:
            if key.startswith("strategy_options"):
                del changes[key]
        changes = {"strategy_options": {}} | changes
    return load_config(request.config, changes | {"strategy": strategy})


def is_one_process(request: PlanRequest, strategy: str) -> bool:
    """Return True for a strategy that trains in one process, whatever the number of ranks.

    Raises DistcoreError, one line, for a strategy that is not installed.
    """
    try:
        return strategies.load_strategy(_load(request, strategy)).capabilities.processes == "one"
    except DistcoreError:
        if strategy.partition(":")[0] not in offers("strategies"):
            raise
        return False  # each of its rows says why


def resolve_for(request: PlanRequest, strategy: str, ranks: int) -> Resolved:
    """Resolve the config for ``ranks`` ranks, more than this machine may have room for.

    Raises DistcoreError, one line.
    """
    config = _load(request, strategy)
    # Neither the devices of this machine nor the size of the batch must keep a plan
    # from being made.
    rows_each = 1 if config.micro_batch_size == "auto" else int(config.micro_batch_size)
    unit = rows_each * shards_of(strategies.load_strategy(config).capabilities, ranks)
    batch = -(-config.global_batch_size // unit) * unit
    device = "cpu" if config.device == "auto" else config.device
    if not request.elsewhere:
        _check_here(config)
    changed = with_changes(config, {"nproc": ranks, "device": device, "global_batch_size": batch})
    return resolve(changed, ranks, elsewhere=request.elsewhere)


def _check_here(config: RunConfig) -> None:
    """Raise ConfigError, one line, for a device whose memory neither machine nor user says."""
    try:
        resolve_device(config)
    except ConfigError:
        resolve_device(config, elsewhere=True)  # of a kind that torch does not know it says so
        raise ConfigError(
            f"--device {config.device}: torch sees none here; say how much memory one has, such as"
            " --device-memory 80G"
        ) from None


def shards_of(declared: Capabilities, ranks: int) -> int:
    """Return the number of data shards of ``ranks`` ranks."""
    return max(1, ranks // declared.ranks_per_shard)
