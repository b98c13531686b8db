"""Limits of memory on this machine, and the memory that a job needs by its plan: a job too
large is not started.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from distcore import Datasets, DistcoreError, Memory, RunConfig, Task, with_changes
from distcore.engine.tracing import StepToTrace, frozen_meta_models
from distcore.lab import EXECUTION, Resolved, strategies
from distcore.model import optimizer_factory
from distcore.plugin.strategy import PlansMemory, TracesStep
from distcore.resolve.padding_free import PADDED, choose_padding_free
from distcore_workbench.planning.available import machine_limits, process_limits, total_memory
from distcore_workbench.planning.byte_sizes import format_size
from distcore_workbench.planning.longest import longest
from distcore_workbench.planning.step import trace
from distcore_workbench.planning.timeline import Moment

TRACED = {*EXECUTION, "loader", "gradient_checkpointing"}
"""Keys of settings that a trace depends on."""


@dataclass
class Plans:
    """The memory that settings of one job need; each is traced once, and none where even the
    largest step has room.
    """

    task: Task
    """Of the job."""
    data: Datasets
    """Its rows."""
    meta_model: nn.Module
    """Its model on the meta device."""
    untraced: list[str] = field(default_factory=list)
    """Why activations of some settings are not known, one line each: those are left out
    by their states alone.
    """
    _peaks: dict[str, Moment | None] = field(default_factory=dict)

    def why_not(self, resolved: Resolved) -> str:
        """Return in one line why a resolved run cannot fit here; empty if it may, or if
        that is not known.
        """
        config, memory = resolved.config, planned_memory(resolved, self.meta_model)
        if memory is not None and (
            said := _too_much(
                config, needed_bytes(memory, config.device), "beside its activations,"
            )
        ):
            return said
        # a trace sees one memory
        is_apart = memory is not None and memory.host > 0 and config.device != "cpu"
        if is_apart or (memory is not None and self._has_room(resolved, memory)):
            return ""
        peak = self._peak(resolved)
        return _too_much(config, peak.total, f"at its peak, in {peak.phase},") if peak else ""

    def _has_room(self, resolved: Resolved, memory: Memory) -> bool:
        """Return True if the states fit beside the activations of a whole step on one rank,
        which no setting exceeds.

        So, with much memory, one trace does for all settings.
        """
        config, most = resolved.config, self._whole(resolved)
        return most is not None and not _too_much(
            config, needed_bytes(memory, config.device) + most.total, ""
        )

    def _whole(self, resolved: Resolved) -> Moment | None:
        """Return the peak of a whole step on one rank, padded and nothing recomputed; ``None`` if
        it is not known.
        """
        config = resolved.config
        whole: dict[str, Any] = {
            "strategy": "single",
            "strategy_options": {},
            "nproc": 1,
            **PADDED,
            "gradient_checkpointing": False,
            "micro_batch_size": config.global_batch_size,
            "micro_batch_tokens": None,
        }
        config = with_changes(config, whole)
        single = strategies.load_strategy(config)
        return self._peak(
            replace(
                resolved, config=config, strategy=single.plugin, capabilities=single.capabilities
            )
        )

    def _peak(self, resolved: Resolved) -> Moment | None:
        """Return the moment of a step at which a resolved run holds most; ``None`` if
        that cannot be traced.
        """
        key = resolved.config.model_dump_json(include=TRACED)
        if key not in self._peaks:
            self._peaks[key] = self._trace_peak(resolved)
        return self._peaks[key]

    def _trace_peak(self, resolved: Resolved) -> Moment | None:
        config, strategy, declared = resolved.config, resolved.strategy, resolved.capabilities
        try:
            if not isinstance(strategy, TracesStep):
                raise DistcoreError(
                    f"strategy {config.strategy!r} does not say how its step can be traced"
                )
            config, _ = choose_padding_free(config, declared, self.task, self.data)
            ranks = int(config.nproc)
            shards = max(1, ranks // declared.ranks_per_shard)
            batch, values = longest(config, self.data.train, shards)
            job = StepToTrace(
                config=config,
                task=self.task,
                meta_model=self.meta_model,
                frozen=frozen_meta_models(config, self.task, self.data),
                batch=values,
                rows=batch.rows,
                micro_batches=batch.of_step,
                ranks=ranks,
            )
            return trace(job, strategy.traced()).peak
        except DistcoreError as error:
            self._report_untraced(" ".join(str(error).split()))
            return None

    def _report_untraced(self, why: str) -> None:
        if why not in self.untraced:
            self.untraced.append(why)
            print(
                f"left out by states alone, without activations: {why}", file=sys.stderr, flush=True
            )


def planned_memory(resolved: Resolved, meta_model: nn.Module) -> Memory | None:
    """Return the memory of the fullest rank of a resolved run, as ``distcore plan`` has
    it; ``None``: not known.

    Activations are not in it.
    """
    config, strategy = resolved.config, resolved.strategy
    if not isinstance(strategy, PlansMemory):
        return None
    try:
        return strategy.plan_memory(
            config, copy.deepcopy(meta_model), int(config.nproc), optimizer_factory(config)
        )
    except DistcoreError:
        return None


def needed_bytes(memory: Memory, device: str) -> int:
    """Return the bytes that a rank needs at the least; where it computes in main
    memory, offload spares none.
    """
    return memory.states + memory.buffers + (memory.host if device == "cpu" else 0)


def _too_much(config: RunConfig, need: int, when: str) -> str:
    """Return in one line why ranks that need so many bytes each cannot fit here;
    empty if they may.
    """
    ranks = int(config.nproc)
    if config.device != "cpu":
        total = total_memory(config.device)
        return _over(need, total, when, f"a device of kind {config.device!r} has") if total else ""
    each = min(process_limits(), default=None)
    said = _over(need, each, when, "a process here may take") if each else ""
    return said or _over(need * ranks, min(machine_limits()), when, f"{ranks} rank(s) have")


def _over(need: int, limit: int, when: str, who: str) -> str:
    return (
        f"needs {format_size(need)} {when} and {who} {format_size(limit)}" if need > limit else ""
    )
