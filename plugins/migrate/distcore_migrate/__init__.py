"""From the files and commands of other trainers to a config: nothing of them is dropped in silence.

One file for each format that is read, with a table of rules, one per key.
Nothing here imports torch.
"""

from distcore_migrate.migration import Migration as Migration
from distcore_migrate.migration import migrate as migrate

__all__ = ["Migration", "migrate"]
__version__ = "0.1.0"
