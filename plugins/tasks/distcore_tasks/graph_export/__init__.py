"""Exports of a model as one graph, which needs none of its code; begin with ``graph``."""
