"""``distcore tune``: the fastest setting of a job that keeps its mathematics, or the first that
fits, by short runs.
"""
