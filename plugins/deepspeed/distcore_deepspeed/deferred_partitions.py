"""Stage 3 for a model with random weights that no rank builds whole: each parameter is partitioned as it is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from distcore import Values, return_large_blocks
from distcore_deepspeed import engine
from distcore_deepspeed.json_config import ZERO, Tree, UserConfig
from distcore_deepspeed.library import Init

SMALLEST = 2**18
"""Bytes from which a tensor goes back to the system while partitions are made.

Between them the values that they are made of are freed again, and glibc 2.36 gives such a gap to no tensor of the same
size: ranks took up to half more memory than their partitions.
"""


def can_partition(user: UserConfig) -> bool:
    """True if stage 3 can begin with partitions: in memory, and cut over all ranks."""
    return user.stage == 3 and user.keeps_masters and user.get(f"{ZERO}.mics_shard_size") is None


def partition(model: nn.Module, values: Values, tree: Tree) -> dict[str, Tensor]:
    """Partition the parameters of ``model``, which are on the meta device, with ``values``, as ``tree`` says.

    Returns of each the fp32 values of this rank's partition if the model's own are in 16 bits; else nothing.
    """
    return_large_blocks(SMALLEST)
    with engine.quiet():
        begun = _Begun(model, values, tree)
    return_large_blocks()
    for module in model.modules():  # DeepSpeed moves no model that is partitioned
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(begun.local_device))
    return begun.exact


class _Begun(Init):  # type: ignore[misc]  # DeepSpeed leaves it untyped
    """DeepSpeed's partitioning, of parameters that have no values yet, and without a broadcast of them."""

    def __init__(self, model: nn.Module, values: Values, tree: Tree) -> None:
        self._values = values
        self.exact: dict[str, Tensor] = {}
        super().__init__(module=model, config_dict_or_path=tree)

    def _convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        """Convert all parameters of the model, in the order in which they are drawn, the same on every rank."""
        own: dict[str, Any] = dict(self.module.named_parameters())
        for name, drawn in self._values(lambda name: self._part(own[name].numel())):
            parameter, (start, count) = own[name], self._part(own[name].numel())
            # Of what lies outside of the partition no page is touched, and on a CPU it takes no memory.
            whole = torch.empty(parameter.shape, dtype=self.dtype, device=self.local_device)
            whole.view(-1)[start : start + count] = drawn
            filled = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, filled)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            if self.dtype != torch.float32:
                self.exact[name] = drawn.clone()
            del drawn, whole, filled  # before DeepSpeed copies the partition, and before the next one is drawn
            self._convert_to_deepspeed_param(parameter)
            parameter.partition()

    def _part(self, elements: int) -> tuple[int, int]:
        """Return start and length of this rank's partition, without padding; all where ranks keep a second one."""
        if self.zero_param_process_group is not None:
            return 0, elements
        size = -(-elements // self.dp_world_size)
        start = min(size * self.rank, elements)
        return start, min(size, elements - start)
