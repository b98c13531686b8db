"""The side of a task: its types, its methods on one page, and its bound face, by which the core calls it.

Begin with `spec`, the methods of a task, and `dataset_spec`, the members of a dataset. `bound` is the one module that
asks whether a task has a method, `datasets` the one that asks it of a dataset.
"""
