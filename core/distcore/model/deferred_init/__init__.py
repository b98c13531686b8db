"""Deferred init: record how a model draws its random weights, and replay the draws in parts.

A model may be larger than one rank. The room is separate because it depends on internals of torch's
dispatcher. Begin with `recording`.
"""
