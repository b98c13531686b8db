"""Limits of memory on this machine, and a job's need by its plan: one too large is not started."""

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
    """The memory that settings of one job need.

    Each is traced once, and none where even the largest step has room.
    """

    task: Task
    """Of the job."""
    data: Datasets
    """Its rows."""
    meta_model: nn.Module
    """Its model on the meta device."""
    untraced: list[str] = field(default_factory=list)
    """Why activations of some settings are not known, one line each.

    Those are left out by their states alone.
    """
    _peaks: dict[str, Moment | None] = field(default_factory=dict)

    def why_not(self, resolved: Resolved) -> str:
        """Return in one line why a resolved run cannot fit here; empty if it may.

        Empty, too, if that is not known.
        """
        config = resolved.config
        memory = planned_memory(resolved, self.meta_model)
        if memory is not None:
            need = needed_bytes(memory, config.device)
            reason = _too_much(config, need, "beside its activations,")
            if reason:
                return reason
            # A trace sees one memory, not that of the device apart from the main one.
            is_offloaded = memory.host > 0 and config.device != "cpu"
            if is_offloaded or self._has_room(resolved, memory):
                return ""
        peak = self._peak(resolved)
        if peak is None:
            return ""
        return _too_much(config, peak.total, f"at its peak, in {peak.phase},")

    def _has_room(self, resolved: Resolved, memory: Memory) -> bool:
        """Return True if the states fit with the activations of a whole step on one rank.

        No setting has more. So, with much memory, one trace does for all settings.
        """
        largest_step = self._largest_step(resolved)
        if largest_step is None:
            return False
        config = resolved.config
        need = needed_bytes(memory, config.device) + largest_step.total
        return not _too_much(config, need, "")

    def _largest_step(self, resolved: Resolved) -> Moment | None:
        """Return the peak of a whole step on one rank, padded and nothing recomputed.

        ``None`` if it is not known.
        """
        config = resolved.config
        changes: dict[str, Any] = {
            "strategy": "single",
            "strategy_options": {},
            "nproc": 1,
            **PADDED,
            "gradient_checkpointing": False,
            "micro_batch_size": config.global_batch_size,
            "micro_batch_tokens": None,
        }
        config = with_changes(config, changes)
        single = strategies.load_strategy(config)
        run = replace(
            resolved, config=config, strategy=single.plugin, capabilities=single.capabilities
        )
        return self._peak(run)

    def _peak(self, resolved: Resolved) -> Moment | None:
        """Return the fullest moment of a step; ``None`` if the step cannot be traced."""
        key = resolved.config.model_dump_json(include=TRACED)
        if key not in self._peaks:
            self._peaks[key] = self._trace_peak(resolved)
        return self._peaks[key]

    def _trace_peak(self, resolved: Resolved) -> Moment | None:
        """Trace a step, and return its fullest moment; report once why it cannot be traced."""
        config = resolved.config
        strategy = resolved.strategy
        declared = resolved.capabilities
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

    def _report_untraced(self, reason: str) -> None:
        """Print and keep a reason, once: settings that differ elsewhere have the same."""
        if reason not in self.untraced:
            self.untraced.append(reason)
            line = f"left out by states alone, without activations: {reason}"
            print(line, file=sys.stderr, flush=True)


def planned_memory(resolved: Resolved, meta_model: nn.Module) -> Memory | None:
    """Return the memory of the fullest rank, as ``distcore plan`` has it; ``None``: not known.

    Activations are not in it.
    """
    config = resolved.config
    strategy = resolved.strategy
    if not isinstance(strategy, PlansMemory):
        return None
    try:
        return strategy.plan_memory(
            config, copy.deepcopy(meta_model), int(config.nproc), optimizer_factory(config)
        )
    except DistcoreError:
        return None


def needed_bytes(memory: Memory, device: str) -> int:
    """Return the bytes that a rank needs at the least."""
    need = memory.states + memory.buffers
    if device == "cpu":
        # The rank computes in the memory that offload goes to.
        need += memory.host
    return need


def _too_much(config: RunConfig, need: int, when: str) -> str:
    """Return in one line why ranks with a ``need`` in bytes each cannot fit; empty if they may."""
    ranks = int(config.nproc)
    if config.device != "cpu":
        total = total_memory(config.device)
        if not total:  # unknown
            return ""
        return _over(need, total, when, f"a device of kind {config.device!r} has")
    limit_of_process = min(process_limits(), default=None)
    if limit_of_process:
        reason = _over(need, limit_of_process, when, "a process here may take")
        if reason:
            return reason
    return _over(need * ranks, min(machine_limits()), when, f"{ranks} rank(s) have")


def _over(need: int, limit: int, when: str, who: str) -> str:
    """Return in one line that ``need`` is more than ``limit``; empty if it is not."""
    if need <= limit:
        return ""
    return f"needs {format_size(need)} {when} and {who} {format_size(limit)}"
