"""Ranks as processes of this machine: starting them, their cores and logs, who failed and
why. Begin with `local`.

A public room for launchers and tools: they may import the names in ``__all__``. Names are
imported when they are first used.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
