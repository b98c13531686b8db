"""The options of the strategy ``accelerate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

BackendName = Literal["ddp", "fsdp2", "deepspeed"]


@dataclass(frozen=True, kw_only=True)
class AccelerateOptions:
    """What a user may choose beside what an ``accelerate config`` file says."""

    path_options: ClassVar = ("config_file", "deepspeed_config")

    backend: BackendName | None = None
    """Accelerate's way to spread the model: ddp, fsdp2 or deepspeed; default: the config file's, else ddp."""
    config_file: str | None = None
    """YAML or JSON file of accelerate config."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """deepspeed: what is sharded, as in DeepSpeed; default 2, or what its config says."""
    deepspeed_config: str | dict[str, Any] | None = None
    """deepspeed: DeepSpeed's own JSON, a path or the tree itself."""
    find_unused: bool = False
    """ddp: some parameters take no part in some steps; costs a walk over the graph each step."""
    bucket_mb: int = 25
    """ddp: gradient bucket size in MiB."""
    reshard_after_forward: bool = True
    """fsdp2: free the gathered parameters between forward and backward."""
    cpu_offload: bool = False
    """fsdp2: keep parameters, gradients and optimizer state in host memory."""
    wrap_classes: tuple[str, ...] = ()
    """fsdp2: class names of the layers to shard one by one; default: what the model says it must not split."""
    split_batches: bool = False
    """Passed on to Accelerate; moves no row here: the global batch is always split over ranks."""
    dispatch_batches: bool | None = None
    """Passed on to Accelerate; moves no row here: every rank reads its own."""
