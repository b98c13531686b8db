"""The config: one typed tree, from YAML, flags and ``--set``. Importing it does not import torch.

Begin with `schema`.
"""

from distcore.config.keys import EXECUTION as EXECUTION
from distcore.config.keys import reset_by as reset_by
from distcore.config.loading import JobRequest as JobRequest
from distcore.config.loading import canonical as canonical
from distcore.config.loading import dump_config as dump_config
from distcore.config.loading import is_open as is_open
from distcore.config.loading import load_config as load_config
from distcore.config.loading import with_changes as with_changes
from distcore.config.schema import Clip as Clip
from distcore.config.schema import GroupRule as GroupRule
from distcore.config.schema import LoRA as LoRA
from distcore.config.schema import RunConfig as RunConfig
from distcore.config.short_keys import GIVEN as GIVEN
from distcore.config.values import flatten as flatten
from distcore.config.values import parse_settings as parse_settings
from distcore.config.values import parse_value as parse_value
from distcore.config.values import parse_values as parse_values
