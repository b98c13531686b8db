"""One training loop, distributed backends as plugins, the same mathematics under each.

Everything that a user or a plugin may import stands in ``__all__``; names are imported when they are first used,
so that ``import distcore`` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcore import defaults as defaults
    from distcore import flat as flat
    from distcore.config import RunConfig as RunConfig
    from distcore.config import load_config as load_config
    from distcore.contract import SPEC_VERSION as SPEC_VERSION
    from distcore.contract import Capabilities as Capabilities
    from distcore.contract import Clip as Clip
    from distcore.contract import Micro as Micro
    from distcore.contract import ModelSource as ModelSource
    from distcore.contract import OptimizerFactory as OptimizerFactory
    from distcore.contract import Piece as Piece
    from distcore.contract import Place as Place
    from distcore.contract import Progress as Progress
    from distcore.contract import Run as Run
    from distcore.contract import Sampler as Sampler
    from distcore.contract import SavedState as SavedState
    from distcore.contract import State as State
    from distcore.contract import StepResult as StepResult
    from distcore.contract import World as World
    from distcore.contract import Wrapped as Wrapped
    from distcore.data.cache import cached_folder as cached_folder
    from distcore.devices import device_of as device_of
    from distcore.errors import ConfigError as ConfigError
    from distcore.errors import DistcoreError as DistcoreError
    from distcore.errors import StrategyError as StrategyError
    from distcore.errors import nearest as nearest
    from distcore.evaluation import Evaluation as Evaluation
    from distcore.hookspecs import hookimpl as hookimpl
    from distcore.ranks import gather_rows as gather_rows
    from distcore.ranks import has_state_in_buffers as has_state_in_buffers
    from distcore.ranks import join_process_group as join_process_group
    from distcore.ranks import lay_out_gradients as lay_out_gradients
    from distcore.ranks import leave_process_group as leave_process_group
    from distcore.ranks import open_store as open_store
    from distcore.ranks import sum_over_ranks as sum_over_ranks
    from distcore.sampling import BatchPlan as BatchPlan
    from distcore.sampling import rank_sampler as rank_sampler
    from distcore.tasks.contract import Dataset as Dataset
    from distcore.tasks.contract import Datasets as Datasets
    from distcore.tasks.contract import Task as Task
    from distcore.trainer import train as train

_HOME = {
    "defaults": "distcore.defaults",
    "flat": "distcore.flat",
    "RunConfig": "distcore.config",
    "load_config": "distcore.config",
    "SPEC_VERSION": "distcore.contract",
    "Capabilities": "distcore.contract",
    "Clip": "distcore.contract",
    "Dataset": "distcore.tasks.contract",
    "Datasets": "distcore.tasks.contract",
    "Micro": "distcore.contract",
    "ModelSource": "distcore.contract",
    "OptimizerFactory": "distcore.contract",
    "Piece": "distcore.contract",
    "Place": "distcore.contract",
    "Progress": "distcore.contract",
    "Run": "distcore.contract",
    "Sampler": "distcore.contract",
    "SavedState": "distcore.contract",
    "State": "distcore.contract",
    "StepResult": "distcore.contract",
    "Task": "distcore.tasks.contract",
    "World": "distcore.contract",
    "Wrapped": "distcore.contract",
    "cached_folder": "distcore.data.cache",
    "device_of": "distcore.devices",
    "ConfigError": "distcore.errors",
    "DistcoreError": "distcore.errors",
    "StrategyError": "distcore.errors",
    "nearest": "distcore.errors",
    "Evaluation": "distcore.evaluation",
    "hookimpl": "distcore.hookspecs",
    "gather_rows": "distcore.ranks",
    "has_state_in_buffers": "distcore.ranks",
    "join_process_group": "distcore.ranks",
    "lay_out_gradients": "distcore.ranks",
    "leave_process_group": "distcore.ranks",
    "open_store": "distcore.ranks",
    "sum_over_ranks": "distcore.ranks",
    "BatchPlan": "distcore.sampling",
    "rank_sampler": "distcore.sampling",
    "train": "distcore.trainer",
}
__all__ = sorted([*_HOME, "launch"])
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'distcore' has no attribute {name!r}")
    module = import_module(_HOME[name])
    return module if name in ("defaults", "flat") else getattr(module, name)


# Not when it is first used: by then the package of the same name may have taken its place. Imports no torch.
from distcore.launch import launch as launch  # noqa: E402
