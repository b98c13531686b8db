"""The second step of resolving: values that need the data, then values that
need the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from distcore.checkpoint.row_content import RowContent
from distcore.config import RunConfig, with_changes
from distcore.distributed.agreement import broadcast_from_main, check_agreed
from distcore.model.run_schedule import check_factors, warmup_steps
from distcore.plugin.strategy.contract import Run
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.task import Datasets
from distcore.resolve.absolute_paths import with_absolute_paths
from distcore.resolve.padding_free import PaddingFreeChoice, as_requested, choose_padding_free
from distcore.resolve.resolve import Resolved, best_metric
from distcore.rounding import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed(Resolved):
    """A resolved run with its data: no 'auto' is left."""

    padding_free: PaddingFreeChoice
    """How it was chosen whether rows are padded, which the run checks before its first step."""

    @property
    def config_as_requested(self) -> RunConfig:
        """The config with ``padding_free`` as the user set it, for a run that is to choose
        itself.
        """
        return as_requested(self.config, self.padding_free)


def complete(resolved: Resolved, data: Datasets) -> Completed:
    """Complete a run by the values that depend on its data.

    The result depends on both alone, so every rank gets the same. Raises ConfigError if rows cannot
    be computed as the user wants, no evaluation set has the best metric, or a schedule of the
    user's gives no rates.
    """
    best_metric(resolved.config, resolved.task, data)
    config, choice = choose_padding_free(
        resolved.config, resolved.capabilities, resolved.task, data
    )
    total_steps = total_steps_of(config, len(data.train))
    check_factors(config, total_steps, ceil_div(len(data.train), config.global_batch_size))
    steps = warmup_steps(config, total_steps)
    values = {field.name: getattr(resolved, field.name) for field in fields(Resolved)}
    values["config"] = with_changes(config, {"schedule.warmup_steps": steps})
    return Completed(**values, padding_free=choice)


def in_one_process(config: RunConfig) -> RunConfig:
    """Return the config of the same job in one process without an accelerator, by the
    reference of the strategies.
    """
    alone = {
        "strategy": "single",
        "strategy_options": {},
        "nproc": 1,
        "device": "cpu",
        "precision": "fp32",
    }
    return with_changes(config, alone | {"micro_batch_size": "auto"})


def computed_plainly(config: RunConfig) -> RunConfig:
    """Return the config of the same job without what changes how, and not what, it computes."""
    return with_changes(config, {"gradient_checkpointing": False, "compile": "off"})


def total_steps_of(config: RunConfig, rows: int) -> int:
    """Return the optimizer steps of the whole run; the last batch of an epoch counts even
    if it is not full.
    """
    if config.max_steps:
        return config.max_steps
    return config.epochs * ceil_div(rows, config.global_batch_size)


def size_notes(config: RunConfig, rows: int, total_steps: int) -> Iterator[str]:
    """Yield what is odd in the lengths of a run: a warm-up that does not end, a batch
    that no epoch fills.
    """
    warmup = warmup_steps(config, total_steps)
    if warmup >= max(1, total_steps):
        yield (
            f"schedule.warmup_steps = {warmup}: all {total_steps} steps are warm-up, below the rate"
            f" {config.lr}"
        )
    if rows < config.global_batch_size:
        size = config.global_batch_size
        yield (
            f"a global batch of {size} rows is larger than the data, of which each step takes all"
            f" {rows} rows"
        )


def agree(run: Run, hooks: Hooks, completed: Resolved, rows: str, content: RowContent) -> Run:
    """Return ``run`` with the config that all ranks share: one run folder, and absolute paths.

    ``rows`` is the fingerprint of the training rows, ``content`` the digest of all of them. Raises
    DistcoreError, one line, that names a rank with another config, other rows or another base.
    """
    # Without --out each rank has chosen a folder name by its own clock: the main rank's counts.
    out = broadcast_from_main(run, hooks, str(completed.config.out))
    config = with_changes(completed.config, {"out": out})
    facts: dict[str, object] = {
        "config": config.model_dump(mode="json"),
        "rows": run.rows,
        "steps": run.total_steps,
        "base": run.base.digest if run.base else None,
    }
    for name, model in run.frozen.items():
        facts[f"the frozen model {name!r}"] = model.digest
    # The name of the fact is what the user reads if it differs.
    same_rows = "the content of the training rows (what is random in them belongs into at(epoch))"
    facts[same_rows] = [rows, content.gather(run, hooks)]
    check_agreed(run, hooks, **facts)
    # Not before: on another machine they may differ.
    return replace(run, config=with_absolute_paths(replace(completed, config=config)))
