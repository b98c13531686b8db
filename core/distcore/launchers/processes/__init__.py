"""Ranks as processes of this machine: starting them, their cores and logs, who failed and
why. Begin with `local`.
"""
