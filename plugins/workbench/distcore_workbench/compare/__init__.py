"""Runs side by side: one job under each of several strategies, several settings of one job, or
runs that are there.
"""
