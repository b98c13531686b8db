"""What a plugin sees, cut into the side of a strategy, the side of a task, and batching.

Begin with `strategy.hookspecs`.
"""
