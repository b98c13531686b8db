"""The interface of strategies: hook specs, their arguments and results, and
defaults. Begin with `hookspecs`.

The names in ``__all__`` are the optional abilities of a strategy, each as a protocol. Any
distribution may import them; they are imported when they are first used.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__ = names_of_stub(__name__, __file__)
