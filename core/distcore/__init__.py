"""One training loop, distributed backends as plugins, the same mathematics under each.

Everything that a user or a plugin may import stands in ``__all__``; names are imported when they are first used,
so that ``import distcore`` does not import torch.
"""

from distcore.lazy import names_of_stub

__version__ = "0.1.0"

__all__, __getattr__ = names_of_stub(__name__, __file__)
