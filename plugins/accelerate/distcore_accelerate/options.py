"""The options of the strategy ``accelerate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

BackendName = Literal["ddp", "fsdp2", "deepspeed"]


@dataclass(frozen=True, kw_only=True)
class AccelerateOptions:
    """Options in addition to an ``accelerate config`` file."""

    path_options: ClassVar = ("config_file", "deepspeed_config")

    backend: BackendName | None = None
    """Backend of Accelerate: ddp, fsdp2 or deepspeed; default: the config file's, else ddp."""
    config_file: str | None = None
    """YAML or JSON file of ``accelerate config``."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """deepspeed: ZeRO stage; default: that of DeepSpeed's config, else 2."""
    deepspeed_config: str | dict[str, Any] | None = None
    """deepspeed: DeepSpeed's own JSON, as a path or a mapping."""
    find_unused: bool = False
    """ddp: allow parameters that get no gradient in some steps; costs a walk over the
    graph in every step.
    """
    bucket_mb: Annotated[int, Field(ge=0)] = 25
    """ddp: gradient bucket size in MiB; 0: one bucket per parameter."""
    reshard_after_forward: bool = True
    """fsdp2: free the gathered parameters between forward and backward."""
    cpu_offload: bool = False
    """fsdp2: keep parameters, gradients and optimizer state in host memory."""
    wrap_classes: tuple[str, ...] = ()
    """fsdp2: class names of the layers to shard as units; default: the model's own list."""
