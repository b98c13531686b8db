"""The random numbers of a step: they follow from seed, step and data shard."""

from __future__ import annotations

from distcore.distributed.devices import seed
from distcore.model.row_dropout import RowMasks
from distcore.plugin.strategy.contract import Run

FOR_SEEDS, FOR_STEPS, FOR_SHARDS = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of splitmix64: neighboring seeds, steps and shards give numbers far apart."""
POSITIVE = 2**63 - 1
"""Bits of the numbers that torch's generators take as seeds."""


def seed_step(run: Run, step: int, masks: RowMasks | None) -> None:
    """Seed torch's generators from seed, step and data shard: a resumed run draws the same masks.

    Ranks of one data shard draw the same masks: they hold parts of one model, or copies that must
    stay equal.
    """
    of_all_shards = run.config.seed * FOR_SEEDS + step * FOR_STEPS
    if masks:
        masks.key = (of_all_shards + 1) & POSITIVE
    seed(run.world.device, (of_all_shards + run.world.shard * FOR_SHARDS) & POSITIVE)
