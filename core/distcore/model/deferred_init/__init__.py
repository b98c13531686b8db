"""Random weights larger than a rank: how a model draws them is recorded without memory, and replayed in parts.

Fenced, because it rests on the inner dispatch of torch. Begin with `recording`.
"""
