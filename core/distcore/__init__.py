"""One training loop, distributed backends as plugins, the same mathematics under each.

Everything that a user or a plugin may import stands in ``__all__``; names are imported when they are first used,
so that ``import distcore`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcore.config import Clip as Clip
    from distcore.config import RunConfig as RunConfig
    from distcore.config import dump_config as dump_config
    from distcore.config import flatten as flatten
    from distcore.config import load_config as load_config
    from distcore.config import with_changes as with_changes
    from distcore.data.cache import cached_folder as cached_folder
    from distcore.data.per_epoch import row_random as row_random
    from distcore.distributed import dtensors as dtensors
    from distcore.distributed import flat_buffers as flat_buffers
    from distcore.distributed.collectives import gather_rows as gather_rows
    from distcore.distributed.collectives import sum_over_ranks as sum_over_ranks
    from distcore.distributed.devices import device_of as device_of
    from distcore.distributed.devices import has_jagged_attention as has_jagged_attention
    from distcore.distributed.process_group import join_process_group as join_process_group
    from distcore.distributed.process_group import leave_process_group as leave_process_group
    from distcore.distributed.process_group import open_store as open_store
    from distcore.distributed.replicas import check_gradients_averaged as check_gradients_averaged
    from distcore.distributed.replicas import has_state_in_buffers as has_state_in_buffers
    from distcore.distributed.replicas import rebuild_gradient_buckets as rebuild_gradient_buckets
    from distcore.distributed.traced_buckets import TracedBuckets as TracedBuckets
    from distcore.errors import ConfigError as ConfigError
    from distcore.errors import DataError as DataError
    from distcore.errors import DistcoreError as DistcoreError
    from distcore.errors import ModelError as ModelError
    from distcore.errors import RankError as RankError
    from distcore.errors import SkeletonError as SkeletonError
    from distcore.errors import StoppedError as StoppedError
    from distcore.errors import StrategyError as StrategyError
    from distcore.errors import TaskError as TaskError
    from distcore.errors import nearest as nearest
    from distcore.jobs.train import train as train
    from distcore.launchers import launch as launch
    from distcore.launchers.processes.available_cores import available_cores as available_cores
    from distcore.model.blocks import repeated_blocks as repeated_blocks
    from distcore.model.blocks import repeated_classes as repeated_classes
    from distcore.model.deferred_init.in_parts import build_in_parts as build_in_parts
    from distcore.model.deferred_init.malloc import return_large_blocks as return_large_blocks
    from distcore.model.transformers_log import silence_transformers as silence_transformers
    from distcore.plugin.batching.columns import Column as Column
    from distcore.plugin.batching.columns import ConstantColumn as ConstantColumn
    from distcore.plugin.batching.sampling import BatchPlan as BatchPlan
    from distcore.plugin.batching.sampling import rank_sampler as rank_sampler
    from distcore.plugin.batching.token_budget import TokenCut as TokenCut
    from distcore.plugin.report import Report as Report
    from distcore.plugin.strategy import defaults as defaults
    from distcore.plugin.strategy import footprint as footprint
    from distcore.plugin.strategy.capabilities import SPEC_VERSION as SPEC_VERSION
    from distcore.plugin.strategy.capabilities import Capabilities as Capabilities
    from distcore.plugin.strategy.contract import Base as Base
    from distcore.plugin.strategy.contract import BuiltModel as BuiltModel
    from distcore.plugin.strategy.contract import Evaluation as Evaluation
    from distcore.plugin.strategy.contract import MicroBatch as MicroBatch
    from distcore.plugin.strategy.contract import ModelSource as ModelSource
    from distcore.plugin.strategy.contract import OptimizerFactory as OptimizerFactory
    from distcore.plugin.strategy.contract import PreparedModel as PreparedModel
    from distcore.plugin.strategy.contract import Progress as Progress
    from distcore.plugin.strategy.contract import RankInfo as RankInfo
    from distcore.plugin.strategy.contract import Run as Run
    from distcore.plugin.strategy.contract import Sampler as Sampler
    from distcore.plugin.strategy.contract import StepLoss as StepLoss
    from distcore.plugin.strategy.contract import StepResult as StepResult
    from distcore.plugin.strategy.contract import Values as Values
    from distcore.plugin.strategy.contract import Wanted as Wanted
    from distcore.plugin.strategy.contract import World as World
    from distcore.plugin.strategy.hookspecs import hookimpl as hookimpl
    from distcore.plugin.strategy.memory import Memory as Memory
    from distcore.plugin.strategy.state import Box as Box
    from distcore.plugin.strategy.state import Piece as Piece
    from distcore.plugin.strategy.state import SavedState as SavedState
    from distcore.plugin.strategy.state import State as State
    from distcore.plugin.task.ragged import Ragged as Ragged
    from distcore.plugin.task.simple import Simple as Simple
    from distcore.plugin.task.task import Batch as Batch
    from distcore.plugin.task.task import Dataset as Dataset
    from distcore.plugin.task.task import Datasets as Datasets
    from distcore.plugin.task.task import Direction as Direction
    from distcore.plugin.task.task import FileRows as FileRows
    from distcore.plugin.task.task import OnResume as OnResume
    from distcore.plugin.task.task import Task as Task

_HOME = {
    "defaults": "distcore.plugin.strategy.defaults",
    "dtensors": "distcore.distributed.dtensors",
    "flat_buffers": "distcore.distributed.flat_buffers",
    "footprint": "distcore.plugin.strategy.footprint",
    "RunConfig": "distcore.config",
    "dump_config": "distcore.config",
    "load_config": "distcore.config",
    "with_changes": "distcore.config",
    "SPEC_VERSION": "distcore.plugin.strategy.capabilities",
    "Base": "distcore.plugin.strategy.contract",
    "Box": "distcore.plugin.strategy.state",
    "BuiltModel": "distcore.plugin.strategy.contract",
    "Capabilities": "distcore.plugin.strategy.capabilities",
    "Clip": "distcore.config",
    "Column": "distcore.plugin.batching.columns",
    "ConstantColumn": "distcore.plugin.batching.columns",
    "Dataset": "distcore.plugin.task.task",
    "Datasets": "distcore.plugin.task.task",
    "FileRows": "distcore.plugin.task.task",
    "Memory": "distcore.plugin.strategy.memory",
    "MicroBatch": "distcore.plugin.strategy.contract",
    "ModelSource": "distcore.plugin.strategy.contract",
    "OptimizerFactory": "distcore.plugin.strategy.contract",
    "Piece": "distcore.plugin.strategy.state",
    "Ragged": "distcore.plugin.task.ragged",
    "RankInfo": "distcore.plugin.strategy.contract",
    "Report": "distcore.plugin.report",
    "Progress": "distcore.plugin.strategy.contract",
    "Run": "distcore.plugin.strategy.contract",
    "Sampler": "distcore.plugin.strategy.contract",
    "SavedState": "distcore.plugin.strategy.state",
    "State": "distcore.plugin.strategy.state",
    "StepResult": "distcore.plugin.strategy.contract",
    "Task": "distcore.plugin.task.task",
    "Values": "distcore.plugin.strategy.contract",
    "Wanted": "distcore.plugin.strategy.contract",
    "World": "distcore.plugin.strategy.contract",
    "PreparedModel": "distcore.plugin.strategy.contract",
    "cached_folder": "distcore.data.cache",
    "device_of": "distcore.distributed.devices",
    "build_in_parts": "distcore.model.deferred_init.in_parts",
    "return_large_blocks": "distcore.model.deferred_init.malloc",
    "ConfigError": "distcore.errors",
    "DistcoreError": "distcore.errors",
    "RankError": "distcore.errors",
    "SkeletonError": "distcore.errors",
    "StoppedError": "distcore.errors",
    "StrategyError": "distcore.errors",
    "nearest": "distcore.errors",
    "Evaluation": "distcore.plugin.strategy.contract",
    "hookimpl": "distcore.plugin.strategy.hookspecs",
    "check_gradients_averaged": "distcore.distributed.replicas",
    "gather_rows": "distcore.distributed.collectives",
    "has_state_in_buffers": "distcore.distributed.replicas",
    "join_process_group": "distcore.distributed.process_group",
    "rebuild_gradient_buckets": "distcore.distributed.replicas",
    "TracedBuckets": "distcore.distributed.traced_buckets",
    "repeated_blocks": "distcore.model.blocks",
    "repeated_classes": "distcore.model.blocks",
    "leave_process_group": "distcore.distributed.process_group",
    "open_store": "distcore.distributed.process_group",
    "sum_over_ranks": "distcore.distributed.collectives",
    "Batch": "distcore.plugin.task.task",
    "StepLoss": "distcore.plugin.strategy.contract",
    "BatchPlan": "distcore.plugin.batching.sampling",
    "rank_sampler": "distcore.plugin.batching.sampling",
    "row_random": "distcore.data.per_epoch",
    "train": "distcore.jobs.train",
    "Simple": "distcore.plugin.task.simple",
    "launch": "distcore.launchers",
    "available_cores": "distcore.launchers.processes.available_cores",
    "flatten": "distcore.config",
    "DataError": "distcore.errors",
    "ModelError": "distcore.errors",
    "TaskError": "distcore.errors",
    "Direction": "distcore.plugin.task.task",
    "OnResume": "distcore.plugin.task.task",
    "TokenCut": "distcore.plugin.batching.token_budget",
    "has_jagged_attention": "distcore.distributed.devices",
    "silence_transformers": "distcore.model.transformers_log",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'distcore' has no attribute {name!r}")
    module = import_module(_HOME[name])
    return module if name in ("defaults", "dtensors", "flat_buffers", "footprint") else getattr(module, name)
