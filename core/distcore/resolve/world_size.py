"""Numbers of ranks and data shards of a run, and a check that batches can be divided among them."""

from __future__ import annotations

from distcore.config import RunConfig
from distcore.distributed.devices import count_devices
from distcore.errors import ConfigError
from distcore.plugin.strategy.capabilities import Capabilities
from distcore.resolve.strategies import names_that


def world_size(config: RunConfig, declared: Capabilities, device: str, started: int | None) -> int:
    """Return the number of ranks; ``started`` of them if a launcher has
    started some. Raises ConfigError.

    'auto' means one rank per device of type ``device`` if the strategy supports several ranks, and
    one on a CPU.
    """
    nproc = config.nproc
    if nproc != "auto" and nproc < 1:
        raise ConfigError(f"nproc = {nproc}: must be at least 1")
    if started is not None:
        if nproc not in ("auto", started):
            raise ConfigError(
                f"nproc = {nproc}: the launcher started {started} ranks; leave out --nproc"
            )
        size = started
    elif nproc != "auto":
        size = nproc
    elif device != "cpu" and declared.processes == "many":
        size = count_devices(device)
    else:
        size = 1
    if declared.processes == "one" and size > 1:
        others = names_that(lambda other: other.processes == "many")
        how = f"use --nproc 1, or a --strategy of several: {others}"
        raise ConfigError(
            f"nproc = {size}: strategy {config.strategy!r} runs in one process; {how}"
        )
    if device != "cpu" and started is None and size > count_devices(device):
        here = f"torch sees {count_devices(device)} of kind {device!r} here"
        raise ConfigError(
            f"nproc = {size}: one device for each rank, and {here}; use fewer ranks or --device cpu"
        )
    return size


def data_shards(config: RunConfig, declared: Capabilities, world_size: int) -> int:
    """Return how many data shards ``world_size`` ranks make; raises ConfigError where some ranks
    would be left over.
    """
    unit = declared.ranks_per_shard
    if world_size % unit:
        below = world_size // unit * unit
        multiples = [size for size in (below, below + unit) if size]
        raise ConfigError(
            f"--nproc {world_size}: under strategy {config.strategy!r} {unit} ranks train on the"
            f" same rows, so their number must be a multiple of {unit}",
            *({"--nproc": size} for size in multiples),
        )
    return world_size // unit


def check_micro_batch_size(config: RunConfig, shards: int) -> None:
    """Raise ConfigError unless the global batch is a multiple of micro-batch times data shards.

    Under ``exact`` it need not be: blocks are cut for any number of shards.
    """
    rows = config.global_batch_size
    is_auto = config.micro_batch_size == "auto"
    micro = 1 if config.micro_batch_size == "auto" else config.micro_batch_size
    if micro < 1:
        raise ConfigError(f"micro_batch_size = {micro}: must be at least 1")
    if config.exact is not None or rows % (shards * micro) == 0:
        return
    ranks_per_shard = int(config.nproc) // shards
    groups = f"{shards} groups of {ranks_per_shard} ranks"
    if ranks_per_shard == 1:
        groups = f"{shards} rank{'s' * (shards > 1)}"
    problem = (
        f"the {rows} rows of a step (--global-batch-size) cannot be shared equally by {groups}"
    )
    if is_auto:
        problem = f"--nproc {config.nproc}: {problem}"
    else:
        problem = f"--micro-batch-size {micro}: {problem} in pieces of {micro}"
    raise ConfigError(problem, *_remedies(rows, micro, shards, ranks_per_shard))


def _remedies(rows: int, micro: int, shards: int, ranks_per_shard: int) -> list[dict[str, int]]:
    """Return the nearest settings that fit: another global batch, and another of the two others.

    The ``rows`` of a step do not split into ``micro`` rows on each of ``shards`` data shards. A
    remedy is a value by flag.
    """
    unit = shards * micro
    below = rows // unit * unit
    multiples = [size for size in (below, below + unit) if size]
    remedies = [{"--global-batch-size": _nearest(rows, multiples)}]
    if micro > 1 and rows % shards == 0:
        micro_sizes = _divisors(rows // shards, micro)
        remedies.append({"--micro-batch-size": _nearest(micro, micro_sizes)})
    elif shards > 1 and rows % micro == 0:
        numbers_of_shards = _divisors(rows // micro, 2 * shards)
        remedies.append({"--nproc": ranks_per_shard * _nearest(shards, numbers_of_shards)})
    elif len(multiples) > 1:
        remedies = [{"--global-batch-size": size} for size in multiples]
    return remedies


def _divisors(number: int, most: int) -> list[int]:
    """Return the divisors of ``number`` up to ``most``."""
    return [size for size in range(1, most + 1) if number % size == 0]


def _nearest(value: int, sizes: list[int]) -> int:
    """Return the size nearest to ``value``; of two as near the smaller, unless that is 1."""
    return min(sizes, key=lambda size: (abs(size - value), size == 1, size))
