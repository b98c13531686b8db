"""Preference tuning of language models; see ``task``."""
