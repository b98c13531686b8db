"""Numbers of ranks and data shards of a run, and a check that batches can be divided among them."""

from __future__ import annotations

from distcore.config import RunConfig
from distcore.distributed.devices import count_devices
from distcore.errors import ConfigError
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.resolve.strategies import names_that

MOST_RANKS = 2**16
"""Most ranks that a message proposes."""


def world_size(config: RunConfig, declared: Capabilities, device: str, started: int | None) -> int:
    """Return the number of ranks; ``started`` of them if a launcher has started some. Raises ConfigError.

    'auto' means one rank per device of type ``device`` if the strategy supports several ranks, and one on a CPU.
    """
    asked = config.nproc
    if asked != "auto" and asked < 1:
        raise ConfigError(f"nproc = {asked}: must be at least 1")
    if started is not None:
        if asked not in ("auto", started):
            raise ConfigError(f"nproc = {asked}: the launcher started {started} ranks; leave out --nproc")
        size = started
    elif asked == "auto":
        size = count_devices(device) if device != "cpu" and declared.processes == "many" else 1
    else:
        size = asked
    if declared.processes == "one" and size > 1:
        others = names_that(lambda other: other.processes == "many")
        raise ConfigError(f"nproc = {size}: strategy {config.strategy!r} runs in one process; {others} can use several")
    if device != "cpu" and started is None and size > count_devices(device):
        here = f"torch sees {count_devices(device)} of kind {device!r} here"
        raise ConfigError(f"nproc = {size}: one device for each rank, and {here}; use fewer ranks or --device cpu")
    return size


def data_shards(config: RunConfig, declared: Capabilities, world_size: int) -> int:
    """Return how many data shards ``world_size`` ranks make; raises ConfigError where some ranks would be left over."""
    shards, left_over = divmod(world_size, declared.ranks_per_shard)
    if left_over:
        unit = declared.ranks_per_shard
        raise ConfigError(
            f"nproc = {world_size}: under strategy {config.strategy!r} {unit} ranks train on the same rows, so their "
            f"number must be a multiple of {unit}; nearest possible: {_nearest_multiples(world_size, unit)}"
        )
    return shards


def check_micro_batch_size(config: RunConfig, shards: int) -> None:
    """Raise ConfigError unless the global batch is a multiple of micro-batch times data shards."""
    whole, micro = config.global_batch_size, config.micro_batch_size
    if micro != "auto" and micro < 1:
        raise ConfigError(f"micro_batch_size = {micro}: must be at least 1")
    unit = shards * (1 if micro == "auto" else micro)
    if whole % unit:
        raise ConfigError(
            f"global_batch_size = {whole}: must be a multiple of micro_batch_size * ranks = {micro} * {shards} = "
            f"{unit}; nearest possible: {_nearest_multiples(whole, unit)}{_ranks_that_go(config, shards)}"
        )


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return ", ".join(str(size) for size in (below, below + unit) if size)


def _ranks_that_go(config: RunConfig, shards: int) -> str:
    """Return a hint with the numbers of ranks, below and above, that the global batch can be divided among."""
    whole, micro = config.global_batch_size, 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    each = max(1, int(config.nproc) // shards)  # ranks of one data shard
    parts = 0 if whole % micro else min(whole // micro, MOST_RANKS)
    possible = [size for size in range(1, parts + 1) if whole // micro % size == 0]
    sizes = [*[size for size in possible if size < shards][-1:], *[size for size in possible if size > shards][:1]]
    return f"; {whole} goes with {' or '.join(str(size * each) for size in sizes)} rank(s)" if sizes else ""
