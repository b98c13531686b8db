"""The interface of strategies: hook specs, their arguments and results, and defaults.

Begin with `hookspecs`.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
