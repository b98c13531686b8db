"""Tensor parallel layers with sharded replicas for distcore; the strategy is ``distcore_mesh.mesh.MeshStrategy``."""

__version__ = "0.1.0"
