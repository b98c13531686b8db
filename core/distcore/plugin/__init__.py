"""The core's interface for plugins: for strategies, for tasks, and batching.

Begin with `strategy.hookspecs`.
"""
