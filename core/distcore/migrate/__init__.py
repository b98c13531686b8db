"""From the files and commands of other trainers to a config: nothing of them is dropped in silence.

One file for each format that is read, with a table whose rows say what becomes of a key. It alone in the core knows the
names of backends: they are words of those formats, and of the config that is printed. Nothing here imports torch.
"""

from distcore.migrate.migration import Migration as Migration
from distcore.migrate.migration import migrate as migrate
