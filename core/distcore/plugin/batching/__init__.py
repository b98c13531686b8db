"""The rows of a step, and the cut of a step into micro-batches. Begin with `sampling`.

A public room for tasks and tools: they may import the names in ``__all__``. Names are
imported when they are first used.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
