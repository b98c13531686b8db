"""The rank of a process, from the variables of its launcher. Begin with `environment`."""

from distcore.rank_environment.environment import export, join

__all__ = ["export", "join"]
