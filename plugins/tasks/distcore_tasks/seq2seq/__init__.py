"""Sequence to sequence: a model reads the first text of a pair, and writes the second."""
