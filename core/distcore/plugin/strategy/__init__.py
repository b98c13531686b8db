"""The interface of strategies: hook specs, their arguments and results, and
defaults. Begin with `hookspecs`.
"""
