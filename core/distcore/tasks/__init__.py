"""What distcore can train, and ``Simple``, the short path to a task of one's own."""

from distcore.tasks.simple import Simple

__all__ = ["Simple"]
