"""The state of a model that Accelerate shards, from hook to hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.fsdp import register_fsdp_forward_method

from distcore import dtensors
from distcore.distributed import RepeatedCalls


@dataclass(frozen=True)
class ShardedState:
    """The backend's state for a model that trains."""

    sync: dtensors.GradientSync
    """Tells layers when to send gradients."""
    calls: RepeatedCalls
    """The calls of the layers in the forward pass that is under way."""

    @classmethod
    def of_training(cls, root: Any) -> ShardedState:
        """Return the state of a model before its first step, which adds gradients over
        ranks and divides nothing.
        """
        dtensors.refuse_mixed_dtypes(root)
        dtensors.sum_gradients(root)
        return cls(dtensors.GradientSync(root), RepeatedCalls(root, register_fsdp_forward_method))
