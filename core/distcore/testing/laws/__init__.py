"""The cases of the laws, one module per law: every function that ``STRATEGIES``
registers measures one promise.
"""
