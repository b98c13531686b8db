from distcore.plugin.batching.columns import is_windowed as is_windowed
from distcore.plugin.batching.columns import read as read
from distcore.plugin.batching.columns import whole as whole
from distcore.plugin.batching.permutation import Feistel as Feistel
from distcore.plugin.batching.sampling import training_plan as training_plan
from distcore.plugin.batching.token_budget import TokenCut as TokenCut
from distcore.plugin.task.per_epoch import in_epoch as in_epoch

__all__: list[str]
