"""Trackers of runs: TensorBoard, Weights & Biases and MLflow, each an extension.

Begin at ``tracking``, their common base; each module beside it is one tracker.
"""

__version__ = "0.1.0"
