from distcore.config import flatten as flatten
from distcore.config.keys import EXECUTION as EXECUTION
from distcore.engine.evaluation import collect as collect
from distcore.engine.evaluation import forward_all as forward_all
from distcore.engine.loop import train_step as train_step
from distcore.jobs.export import export_checkpoint as export_checkpoint
from distcore.jobs.logs import at_level as at_level
from distcore.jobs.train import check as check
from distcore.jobs.train import what_is_saved as what_is_saved
from distcore.model.model_source import model_source as model_source
from distcore.plugin.strategy.hooks import Hooks as Hooks
from distcore.plugin.task.bound import BoundTask as BoundTask
from distcore.resolve import strategies as strategies
from distcore.resolve.absolute_paths import with_absolute_paths as with_absolute_paths
from distcore.resolve.complete import Completed as Completed
from distcore.resolve.complete import complete as complete
from distcore.resolve.resolve import Resolved as Resolved
from distcore.resolve.resolve import resolve as resolve

__all__: list[str]
