"""The cases of the laws, one module per law: every function marked ``law`` or
``job_law`` measures one promise.
"""
