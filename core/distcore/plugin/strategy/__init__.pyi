from distcore.plugin.strategy.capabilities import ChecksConfig as ChecksConfig
from distcore.plugin.strategy.capabilities import ChecksEvaluation as ChecksEvaluation
from distcore.plugin.strategy.capabilities import ChecksModel as ChecksModel
from distcore.plugin.strategy.capabilities import FillsConfig as FillsConfig
from distcore.plugin.strategy.memory import HoldsExtraTensors as HoldsExtraTensors
from distcore.plugin.strategy.memory import PlansMemory as PlansMemory
from distcore.plugin.strategy.memory import TracesStep as TracesStep

__all__: list[str]
