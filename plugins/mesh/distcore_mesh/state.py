"""The strategy's state during a run, from hook to hook."""

from __future__ import annotations

from dataclasses import dataclass

from distcore import dtensors
from distcore.distributed import RepeatedCalls
from distcore_mesh.context_parallel import SplitSequences
from distcore_mesh.stages import Stages
from distcore_mesh.tensor_layout import TensorLayout


@dataclass(frozen=True)
class MeshState:
    """The placement of a model on the mesh, as this rank sees it."""

    layout: TensorLayout
    """The part of each tensor that this rank holds."""
    sequences: SplitSequences | None
    """The split of sequences over ranks, by ``cp`` or ``sequence_parallel``; ``None``: whole."""
    stages: Stages | None
    """The pipeline stages of this rank; ``None`` without a pipeline."""
    sync: dtensors.GradientSync | None = None
    """Tells units when to send gradients; ``None``: nothing is sharded or replicated."""
    calls: RepeatedCalls | None = None
    """Calls of units in the running forward pass; ``None`` without units, and in a pipeline."""
