"""The interface of tasks: types, all methods on one page, and the bound task that the core calls.

Begin with `spec`, the methods of a task, and `dataset_spec`, the members of a dataset. Only `bound`
looks for optional methods of a task, and only `datasets` for optional members of a dataset.
"""
