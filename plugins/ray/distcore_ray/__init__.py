"""Ranks of distcore on the machines of a Ray cluster: ``--launcher ray``."""

__version__ = "0.1.0"
