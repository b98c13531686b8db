"""The options of the strategy ``deepspeed``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from distcore_deepspeed.json_config import ZERO, Setting, UserConfig, read_config

Device = Literal["none", "cpu", "nvme"]
SECTION_OF = {
    "stage": ZERO,
    "overlap_comm": ZERO,
    "reduce_bucket_size": ZERO,
    "allgather_bucket_size": ZERO,
    "round_robin_gradients": ZERO,
    "sub_group_size": ZERO,
    "stage3_prefetch_bucket_size": ZERO,
    "stage3_param_persistence_threshold": ZERO,
    "stage3_max_live_parameters": ZERO,
    "stage3_max_reuse_distance": ZERO,
    "initial_scale_power": "fp16",
    "loss_scale_window": "fp16",
    "hysteresis": "fp16",
    "min_loss_scale": "fp16",
    "communication_data_type": "",
    "cpu_checkpointing": "activation_checkpointing",
}
"""Map each option that is a key of DeepSpeed's config to the section of that key."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions:
    """The options of the strategy. An option that is also a key of DeepSpeed's JSON must
    agree with the JSON.
    """

    path_options: ClassVar = ("config", "nvme_path")

    stage: Literal[0, 1, 2, 3] | None = None
    """Sharding: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. Default:
    the config's, or 2.
    """
    offload_optimizer: Device | None = None
    """Device of the optimizer's state and of its step: none, cpu, or nvme (stage 3)."""
    offload_param: Device | None = None
    """Device of parameters between uses: none, cpu or nvme; stage 3."""
    nvme_path: str | None = None
    """Folder on a fast local disk for offload to nvme."""
    overlap_comm: bool | None = None
    """Reduce gradients during the backward pass; DeepSpeed's default: at stage 3."""
    reduce_bucket_size: int | Literal["auto"] | None = None
    """Elements of one gradient reduction; auto: hidden size squared."""
    allgather_bucket_size: int | None = None
    """Elements of one all-gather of updated weights, stages 1 and 2."""
    round_robin_gradients: bool | None = None
    """Share the copying of gradients to the host among ranks; stages 1 and 2 with offload."""
    sub_group_size: int | None = None
    """Elements that one optimizer call updates at stage 3."""
    stage3_prefetch_bucket_size: int | Literal["auto"] | None = None
    """Elements gathered ahead of their use; auto: 0.9 hidden size squared."""
    stage3_param_persistence_threshold: int | Literal["auto"] | None = None
    """Parameters smaller than this stay whole on every rank; default auto: 10
    times the hidden size.
    """
    stage3_max_live_parameters: int | None = None
    """Most elements that are whole on a rank at the same time."""
    stage3_max_reuse_distance: int | None = None
    """A parameter that is used again within this many elements is not released."""
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    """Dtype in which gradients are sent. A lower precision than the run's rounds the
    gradient of law 2.
    """
    activation_checkpointing: bool = False
    """Recompute activations with DeepSpeed's function instead of torch's."""
    cpu_checkpointing: bool | None = None
    """Keep checkpointed activations in host memory."""
    initial_scale_power: int | None = None
    """fp16: the first loss scale is 2 to this power."""
    loss_scale_window: int | None = None
    """fp16: steps without overflow after which the scale doubles."""
    hysteresis: int | None = None
    """fp16: overflows before the scale is halved."""
    min_loss_scale: int | None = None
    """fp16: the scale at which the run gives up."""
    scheduler: Literal["WarmupLR", "WarmupDecayLR", "OneCycle", "LRRangeTest"] | None = None
    """DeepSpeed's scheduler, instead of schedule.name."""
    scheduler_params: dict[str, Any] = field(default_factory=dict)
    """The scheduler's parameters; missing ones come from lr, schedule and the number of steps."""
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    """More parameters of DeepSpeed's optimizer than lr, betas, eps and
    weight_decay; torch_adam: torch's AdamW.
    """
    config: str | dict[str, Any] | None = None
    """DeepSpeed's own JSON: a path, or the tree itself."""

    @cached_property
    def user_config(self) -> UserConfig:
        """The options as DeepSpeed's config.

        Raises ConfigError, one line, for a JSON that cannot be read.
        """
        user = read_config(self.config, "strategy_options.config")
        tree = user.tree
        for section, kind, parameters in (
            ("scheduler", self.scheduler, self.scheduler_params),
            ("optimizer", None, self.optimizer_params),
        ):
            if kind or parameters:
                tree[section] = {"params": {}} | tree.get(section, {})
                tree[section] |= {"type": kind} if kind else {}
                tree[section]["params"] = tree[section]["params"] | parameters
        return replace(user, options=tuple(self._settings()))

    def _settings(self) -> Iterator[Setting]:
        for name, section in SECTION_OF.items():
            if (value := getattr(self, name)) is not None:
                yield Setting(f"{section}.{name}".lstrip("."), value, f"strategy_options.{name}")
        for name in ("offload_optimizer", "offload_param"):
            device = getattr(self, name)
            if device is not None:
                yield Setting(f"{ZERO}.{name}.device", device, f"strategy_options.{name}")
            if device == "nvme" and self.nvme_path is not None:
                yield Setting(
                    f"{ZERO}.{name}.nvme_path", self.nvme_path, "strategy_options.nvme_path"
                )
