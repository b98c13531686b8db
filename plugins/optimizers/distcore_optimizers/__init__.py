"""Optimizers of distcore beyond torch's usual ones; each is an entry point
of the group ``distcore.optimizers``.
"""

__version__ = "0.1.0"
