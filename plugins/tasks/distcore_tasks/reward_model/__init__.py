"""Reward models of pairs of answers; see ``task``."""
