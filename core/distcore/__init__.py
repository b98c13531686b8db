"""One training loop, distributed backends as plugins, the same mathematics under each.

Users and plugins may import the names in ``__all__``. Each is imported on first use, so that
``import distcore`` does not import torch.
"""

from distcore.lazy import names_of_stub

__version__ = "0.1.0"

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
