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
    from distcore.config import flatten as flatten
    from distcore.config import load_config as load_config
    from distcore.data.cache import cached_folder as cached_folder
    from distcore.data.varying import row_random as row_random
    from distcore.distributed import dtensors as dtensors
    from distcore.distributed import flat as flat
    from distcore.distributed import footprint as footprint
    from distcore.distributed.blocks import repeated_classes as repeated_classes
    from distcore.distributed.cores import available_cores as available_cores
    from distcore.distributed.devices import device_of as device_of
    from distcore.distributed.in_parts import build_in_parts as build_in_parts
    from distcore.distributed.in_parts import take_weights as take_weights
    from distcore.distributed.large_blocks import return_large_blocks as return_large_blocks
    from distcore.distributed.process_group import check_gradients_averaged as check_gradients_averaged
    from distcore.distributed.process_group import gather_rows as gather_rows
    from distcore.distributed.process_group import has_state_in_buffers as has_state_in_buffers
    from distcore.distributed.process_group import join_process_group as join_process_group
    from distcore.distributed.process_group import leave_process_group as leave_process_group
    from distcore.distributed.process_group import open_store as open_store
    from distcore.distributed.process_group import rebuild_gradient_buckets as rebuild_gradient_buckets
    from distcore.distributed.process_group import sum_over_ranks as sum_over_ranks
    from distcore.distributed.traced import TracedBuckets as TracedBuckets
    from distcore.errors import ConfigError as ConfigError
    from distcore.errors import DistcoreError as DistcoreError
    from distcore.errors import SkeletonError as SkeletonError
    from distcore.errors import StrategyError as StrategyError
    from distcore.errors import nearest as nearest
    from distcore.jobs.train import train as train
    from distcore.launchers import launch as launch
    from distcore.plugin import defaults as defaults
    from distcore.plugin.capabilities import SPEC_VERSION as SPEC_VERSION
    from distcore.plugin.capabilities import Capabilities as Capabilities
    from distcore.plugin.columns import Column as Column
    from distcore.plugin.columns import ConstantColumn as ConstantColumn
    from distcore.plugin.contract import Base as Base
    from distcore.plugin.contract import Evaluation as Evaluation
    from distcore.plugin.contract import MicroBatch as MicroBatch
    from distcore.plugin.contract import ModelSource as ModelSource
    from distcore.plugin.contract import OptimizerFactory as OptimizerFactory
    from distcore.plugin.contract import PreparedModel as PreparedModel
    from distcore.plugin.contract import Progress as Progress
    from distcore.plugin.contract import RankInfo as RankInfo
    from distcore.plugin.contract import Run as Run
    from distcore.plugin.contract import Sampler as Sampler
    from distcore.plugin.contract import StepLoss as StepLoss
    from distcore.plugin.contract import StepResult as StepResult
    from distcore.plugin.contract import Values as Values
    from distcore.plugin.contract import Wanted as Wanted
    from distcore.plugin.contract import World as World
    from distcore.plugin.hookspecs import hookimpl as hookimpl
    from distcore.plugin.memory import Memory as Memory
    from distcore.plugin.ragged import Ragged as Ragged
    from distcore.plugin.report import Report as Report
    from distcore.plugin.sampling import BatchPlan as BatchPlan
    from distcore.plugin.sampling import rank_sampler as rank_sampler
    from distcore.plugin.state import Box as Box
    from distcore.plugin.state import Piece as Piece
    from distcore.plugin.state import SavedState as SavedState
    from distcore.plugin.state import State as State
    from distcore.plugin.task import Batch as Batch
    from distcore.plugin.task import Dataset as Dataset
    from distcore.plugin.task import Datasets as Datasets
    from distcore.plugin.task import FileRows as FileRows
    from distcore.plugin.task import Task as Task

_HOME = {
    "defaults": "distcore.plugin.defaults",
    "dtensors": "distcore.distributed.dtensors",
    "flat": "distcore.distributed.flat",
    "footprint": "distcore.distributed.footprint",
    "RunConfig": "distcore.config",
    "load_config": "distcore.config",
    "SPEC_VERSION": "distcore.plugin.capabilities",
    "Base": "distcore.plugin.contract",
    "Box": "distcore.plugin.state",
    "Capabilities": "distcore.plugin.capabilities",
    "Clip": "distcore.config",
    "Column": "distcore.plugin.columns",
    "ConstantColumn": "distcore.plugin.columns",
    "Dataset": "distcore.plugin.task",
    "Datasets": "distcore.plugin.task",
    "FileRows": "distcore.plugin.task",
    "Memory": "distcore.plugin.memory",
    "MicroBatch": "distcore.plugin.contract",
    "ModelSource": "distcore.plugin.contract",
    "OptimizerFactory": "distcore.plugin.contract",
    "Piece": "distcore.plugin.state",
    "Ragged": "distcore.plugin.ragged",
    "RankInfo": "distcore.plugin.contract",
    "Report": "distcore.plugin.report",
    "Progress": "distcore.plugin.contract",
    "Run": "distcore.plugin.contract",
    "Sampler": "distcore.plugin.contract",
    "SavedState": "distcore.plugin.state",
    "State": "distcore.plugin.state",
    "StepResult": "distcore.plugin.contract",
    "Task": "distcore.plugin.task",
    "Values": "distcore.plugin.contract",
    "Wanted": "distcore.plugin.contract",
    "World": "distcore.plugin.contract",
    "PreparedModel": "distcore.plugin.contract",
    "cached_folder": "distcore.data.cache",
    "device_of": "distcore.distributed.devices",
    "build_in_parts": "distcore.distributed.in_parts",
    "take_weights": "distcore.distributed.in_parts",
    "return_large_blocks": "distcore.distributed.large_blocks",
    "ConfigError": "distcore.errors",
    "DistcoreError": "distcore.errors",
    "SkeletonError": "distcore.errors",
    "StrategyError": "distcore.errors",
    "nearest": "distcore.errors",
    "Evaluation": "distcore.plugin.contract",
    "hookimpl": "distcore.plugin.hookspecs",
    "check_gradients_averaged": "distcore.distributed.process_group",
    "gather_rows": "distcore.distributed.process_group",
    "has_state_in_buffers": "distcore.distributed.process_group",
    "join_process_group": "distcore.distributed.process_group",
    "rebuild_gradient_buckets": "distcore.distributed.process_group",
    "TracedBuckets": "distcore.distributed.traced",
    "repeated_classes": "distcore.distributed.blocks",
    "leave_process_group": "distcore.distributed.process_group",
    "open_store": "distcore.distributed.process_group",
    "sum_over_ranks": "distcore.distributed.process_group",
    "Batch": "distcore.plugin.task",
    "StepLoss": "distcore.plugin.contract",
    "BatchPlan": "distcore.plugin.sampling",
    "rank_sampler": "distcore.plugin.sampling",
    "row_random": "distcore.data.varying",
    "train": "distcore.jobs.train",
    "launch": "distcore.launchers",
    "available_cores": "distcore.distributed.cores",
    "flatten": "distcore.config",
}
__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'distcore' has no attribute {name!r}")
    module = import_module(_HOME[name])
    return module if name in ("defaults", "dtensors", "flat", "footprint") else getattr(module, name)
