"""Checkpoints for a reader: listed, verified, compared and exported."""
