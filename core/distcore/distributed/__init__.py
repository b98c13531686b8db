"""Building blocks of strategies: process group, flat buffers, devices, agreement between ranks.

Begin with `process_group`.

A public room for plugins: they may import the names in ``__all__``. Names are
imported when they are first used.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
