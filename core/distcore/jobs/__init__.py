"""From a config to ranks that train, evaluate or export. No module here knows the command line. Begin with `train`.

A public room for tools that look at a job before or after it runs, such as a planner: what stands in ``__all__`` may be
imported by any distribution. Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcore.checkpoint import find as find
    from distcore.checkpoint.distance import Distance as Distance
    from distcore.checkpoint.distance import distance as distance
    from distcore.config.keys import EXECUTION as EXECUTION
    from distcore.data.per_epoch import in_epoch as in_epoch
    from distcore.distributed.devices import beside_tensors as beside_tensors
    from distcore.distributed.devices import count_devices as count_devices
    from distcore.distributed.devices import peak_memory as peak_memory
    from distcore.distributed.devices import resolve_device as resolve_device
    from distcore.distributed.devices import total_memory as total_memory
    from distcore.engine.loop import scaled_loss as scaled_loss
    from distcore.engine.loop import train_step as train_step
    from distcore.engine.precision import autocast_for as autocast_for
    from distcore.extensions.stopwatch import Stopwatch as Stopwatch
    from distcore.extensions.stopwatch import seconds_between as seconds_between
    from distcore.jobs.logs import set_up_logging as set_up_logging
    from distcore.jobs.train import check as check
    from distcore.launchers.processes.contexts import sigterm_raises as sigterm_raises
    from distcore.launchers.processes.contexts import stop_signals as stop_signals
    from distcore.launchers.processes.cores import crowded as crowded
    from distcore.launchers.processes.cores import foreign_load as foreign_load
    from distcore.launchers.processes.cores import threads_chosen as threads_chosen
    from distcore.launchers.processes.cores import threads_per_rank as threads_per_rank
    from distcore.launchers.processes.failures import one_line as one_line
    from distcore.launchers.processes.stderr import stderr_closed as stderr_closed
    from distcore.model.compiling import missing_compiler as missing_compiler
    from distcore.model.model_source import model_source as model_source
    from distcore.model.optim import check_optimizer as check_optimizer
    from distcore.model.optim import freeze as freeze
    from distcore.model.optim import optimizer_factory as optimizer_factory
    from distcore.plugin.batching.columns import is_windowed as is_windowed
    from distcore.plugin.batching.columns import read as read
    from distcore.plugin.batching.columns import whole as whole
    from distcore.plugin.batching.sampling import training_plan as training_plan
    from distcore.plugin.strategy.capabilities import ChecksModel as ChecksModel
    from distcore.plugin.strategy.hooks import Hooks as Hooks
    from distcore.plugin.strategy.memory import HoldsApart as HoldsApart
    from distcore.plugin.strategy.memory import PlansMemory as PlansMemory
    from distcore.plugin.strategy.memory import TracesStep as TracesStep
    from distcore.plugin.task.bound import BoundTask as BoundTask
    from distcore.rank_environment import join as join
    from distcore.registry import offers as offers
    from distcore.resolve import strategies as strategies
    from distcore.resolve.absolute_paths import with_absolute_paths as with_absolute_paths
    from distcore.resolve.complete import Completed as Completed
    from distcore.resolve.complete import complete as complete
    from distcore.resolve.micro_batches import most_micro_batches as most_micro_batches
    from distcore.resolve.resolve import Resolved as Resolved
    from distcore.resolve.resolve import resolve as resolve
    from distcore.resolve.row_form import PADDED as PADDED
    from distcore.resolve.row_form import choose as choose
    from distcore.resolve.row_form import other_forms as other_forms
    from distcore.resolve.row_form import rows_in_form as rows_in_form
    from distcore.resolve.row_form import set_form as set_form

_HOME = {
    "BoundTask": "plugin.task.bound",
    "ChecksModel": "plugin.strategy.capabilities",
    "Completed": "resolve.complete",
    "Distance": "checkpoint.distance",
    "EXECUTION": "config.keys",
    "HoldsApart": "plugin.strategy.memory",
    "Hooks": "plugin.strategy.hooks",
    "PADDED": "resolve.row_form",
    "PlansMemory": "plugin.strategy.memory",
    "Resolved": "resolve.resolve",
    "Stopwatch": "extensions.stopwatch",
    "TracesStep": "plugin.strategy.memory",
    "autocast_for": "engine.precision",
    "beside_tensors": "distributed.devices",
    "check": "jobs.train",
    "check_optimizer": "model.optim",
    "choose": "resolve.row_form",
    "complete": "resolve.complete",
    "count_devices": "distributed.devices",
    "crowded": "launchers.processes.cores",
    "distance": "checkpoint.distance",
    "find": "checkpoint",
    "foreign_load": "launchers.processes.cores",
    "freeze": "model.optim",
    "in_epoch": "data.per_epoch",
    "is_windowed": "plugin.batching.columns",
    "join": "rank_environment",
    "missing_compiler": "model.compiling",
    "model_source": "model.model_source",
    "most_micro_batches": "resolve.micro_batches",
    "offers": "registry",
    "one_line": "launchers.processes.failures",
    "optimizer_factory": "model.optim",
    "other_forms": "resolve.row_form",
    "peak_memory": "distributed.devices",
    "read": "plugin.batching.columns",
    "resolve": "resolve.resolve",
    "resolve_device": "distributed.devices",
    "rows_in_form": "resolve.row_form",
    "scaled_loss": "engine.loop",
    "seconds_between": "extensions.stopwatch",
    "set_form": "resolve.row_form",
    "set_up_logging": "jobs.logs",
    "sigterm_raises": "launchers.processes.contexts",
    "stderr_closed": "launchers.processes.stderr",
    "stop_signals": "launchers.processes.contexts",
    "strategies": "resolve.strategies",
    "threads_chosen": "launchers.processes.cores",
    "threads_per_rank": "launchers.processes.cores",
    "total_memory": "distributed.devices",
    "train_step": "engine.loop",
    "training_plan": "plugin.batching.sampling",
    "whole": "plugin.batching.columns",
    "with_absolute_paths": "resolve.absolute_paths",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"distcore.{_HOME[name]}")
    return getattr(module, name, module)
