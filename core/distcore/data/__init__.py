"""Data for every task: records of files, splits, a cache on disk, random numbers by epoch and row.

A public room: any task may import the names in ``__all__``. Begin with ``files``. Names are imported when
they are first used, so that a task's class can be imported without pyarrow and filelock.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__ = names_of_stub(__name__, __file__)
