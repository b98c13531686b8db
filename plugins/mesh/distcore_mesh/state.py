"""What the strategy remembers of a run's model from hook to hook."""

from __future__ import annotations

from dataclasses import dataclass

from distcore_mesh.sequences import Sequences
from distcore_mesh.splits import Layout
from distcore_mesh.stages import Stages


@dataclass(frozen=True)
class MeshState:
    """How a model lies on the mesh, as this rank sees it."""

    layout: Layout
    """Which part of each tensor this rank has."""
    sequences: Sequences | None
    """What ranks that share sequences, or their tokens, exchange; ``None``: every rank has whole sequences."""
    stages: Stages | None
    """The stages of a pipeline that this rank computes; ``None`` without one."""
