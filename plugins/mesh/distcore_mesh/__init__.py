"""Tensor, context and pipeline parallelism for distcore; see
``distcore_mesh.strategy.MeshStrategy``.
"""

__version__ = "0.1.0"
