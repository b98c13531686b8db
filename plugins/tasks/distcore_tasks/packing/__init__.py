"""Transformers without padding: the rows of a micro-batch are one sequence for everything but attention."""
