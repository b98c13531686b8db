"""Sequence to sequence: pairs of texts, by a model that reads the first and writes the second."""
