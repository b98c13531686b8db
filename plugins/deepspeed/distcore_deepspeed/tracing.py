"""Run DeepSpeed's own engine on fake tensors, for the traced steps of ``distcore plan``."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from distcore import Capabilities, ConfigError, OptimizerFactory, PreparedModel, Run, hookimpl
from distcore_deepspeed import library
from distcore_deepspeed.build_engine import build
from distcore_deepspeed.engine import StepHooks
from distcore_deepspeed.json_config import UserConfig, put
from distcore_deepspeed.optimizers import optimizer_type

MASTERS = (
    "single_partition_of_fp32_groups",  # stages 1 and 2
    "fp32_partitioned_groups_flat",  # stage 3
    "fp32_groups_flat_partition",  # bf16 with fp32 gradients
)
"""Attributes of DeepSpeed's optimizers that hold the fp32 master weights."""


def traced_engine(
    user: UserConfig, capabilities: Capabilities, activation_checkpointing: bool = False
) -> TracedEngine:
    """Return a stand-in for a strategy with these ``capabilities``.

    Raises ConfigError, one line, for NVMe.
    """
    if not user.keeps_masters:
        raise ConfigError("offload to nvme: the memory that stays in use is not known")
    return TracedEngine(user, capabilities, activation_checkpointing)


class TracedEngine(StepHooks):
    """The engine in the first rank of torch's process group, which DeepSpeed sees on a CPU."""

    most_ranks: ClassVar = 16  # the engine loops over all ranks for each parameter and bucket

    def __init__(
        self, user: UserConfig, capabilities: Capabilities, activation_checkpointing: bool = False
    ) -> None:
        """Stand in for the strategy with these ``capabilities``."""
        self.capabilities = capabilities
        self._user = user
        self._activation_checkpointing = activation_checkpointing
        self._before: tuple[str | None, Any] | None = None

    @hookimpl
    def wrap_model(
        self, run: Run, model: nn.Module, make_optimizer: OptimizerFactory | None
    ) -> PreparedModel:
        """Build the engine, with torch's Adam instead of compiled ones.

        Raises ConfigError for other optimizers.
        """
        user = self._user
        kind = optimizer_type(run.config, user)
        if kind not in (None, "Adam", "AdamW"):
            raise ConfigError(
                f"optimizer {kind}: the state of DeepSpeed's compiled optimizer is not known"
            )
        if kind is not None:
            # DeepSpeed's own Adam is compiled code, which cannot step fake tensors.
            tree = copy.deepcopy(user.tree)
            put(tree, "optimizer.params.torch_adam", True)
            user = replace(user, tree=tree)
        self._before = os.environ.get("LOCAL_RANK"), library.start_tracing()
        os.environ["LOCAL_RANK"] = "0"  # the engine reads it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the process group has no timeout to set
            prepared = build(user, run, model, make_optimizer, self._activation_checkpointing)
        _ignore_overflow(prepared.model.optimizer)
        return prepared

    def extra_tensors(self, run: Run) -> Mapping[str, Iterable[Tensor]]:
        """Return DeepSpeed's own tensors: parts of parameters, copies of gradients, masters."""
        optimizer = getattr(run.model, "optimizer", None)
        partitions = [p.ds_tensor for p in run.module.parameters() if hasattr(p, "ds_tensor")]
        masters: list[Tensor] = []
        for name in MASTERS:
            masters += getattr(optimizer, name, ())
        gradients: list[Tensor] = []
        for averaged in getattr(optimizer, "averaged_gradients", {}).values():
            # A group has None between its step and the next backward.
            gradients += averaged or ()
        gradients += [master.grad for master in masters if master.grad is not None]
        flat_buffer = getattr(optimizer, "grad_partitions_flat_buffer", None)
        if flat_buffer is not None:
            gradients.append(flat_buffer)
        return {"parameters": partitions, "gradients": gradients, "optimizer": masters}

    def close(self) -> None:
        """Forget DeepSpeed's process groups, and restore the environment."""
        if self._before is None:
            return
        local_rank, accelerator = self._before
        library.stop_tracing(accelerator)
        os.environ.pop("LOCAL_RANK")
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank


def _ignore_overflow(optimizer: Any) -> None:
    """Have the optimizer take every step: fake gradients have no values that could overflow."""
    check = getattr(optimizer, "check_overflow", None)

    def check_and_ignore(*arguments: Any, **options: Any) -> None:
        assert check is not None
        check(*arguments, **options)
        optimizer.overflow = False

    if check is not None:
        optimizer.check_overflow = check_and_ignore
