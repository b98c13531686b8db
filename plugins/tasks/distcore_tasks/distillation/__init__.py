"""Distillation of text classifiers; see ``task``."""
