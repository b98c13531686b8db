"""Stage 3 for a model without storage: a rank partitions each parameter as it reads or draws it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor, nn

from distcore import MetaModelError, ModelSource, WeightStream
from distcore.model import return_large_blocks
from distcore_deepspeed import engine, library
from distcore_deepspeed.json_config import Tree, UserConfig
from distcore_deepspeed.library import Init

SMALLEST = 2**18
"""Bytes from which a freed tensor returns to the system while partitions are made.

The whole values are freed between the partitions. glibc 2.36 does not reuse such a gap for a tensor
of the same size, so ranks took up to half more memory than their partitions.
"""


def can_partition(user: UserConfig) -> bool:
    """Return True if the model can be partitioned as it is read: at stage 3, and in memory."""
    return user.stage == 3 and user.keeps_masters


def replay(source: ModelSource) -> tuple[nn.Module, WeightStream]:
    """Return the model of ``source`` without storage, and its values.

    Raises MetaModelError for a parameter that has a weak reference, as those of recurrent layers
    have: torch swaps it for none with values.
    """
    assert source.replay is not None
    model, values = source.replay()
    for name, parameter in model.named_parameters():
        if getweakrefcount(parameter):
            raise MetaModelError(f"the layer of {name} keeps a weak reference to it")
    return model, values


def partition(model: nn.Module, values: WeightStream, tree: Tree) -> dict[str, Tensor]:
    """Partition the parameters of ``model``, on the meta device, and fill them with ``values``.

    ``tree`` is DeepSpeed's config. If the model's precision is 16 bits, returns the fp32 values of
    this rank's partitions, by name; else an empty dict.
    """
    return_large_blocks(SMALLEST)
    library.forget_secondary_partitions()
    with engine.quiet():
        init = _DeferredInit(model, values, tree)
    return_large_blocks()
    # DeepSpeed does not move the buffers of a partitioned model.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(init.local_device))
    return init.exact


class _DeferredInit(Init):  # type: ignore[misc]  # DeepSpeed leaves it untyped
    """DeepSpeed's partitioning for parameters without values, and without its broadcast."""

    def __init__(self, model: nn.Module, values: WeightStream, tree: Tree) -> None:
        self._values = values
        self.exact: dict[str, Tensor] = {}
        super().__init__(module=model, config_dict_or_path=tree)

    def _convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        """Convert all parameters in the order of the stream, which is the same on every rank."""
        parameters: dict[str, Any] = dict(self.module.named_parameters())
        for name, drawn in self._values(lambda name: self._interval(parameters[name].numel())):
            parameter = parameters[name]
            start, count = self._interval(parameter.numel())
            # In fp32 a frozen base keeps its own dtype, which may have 16 bits. Else DeepSpeed
            # casts all but bytes.
            is_cast = self.dtype != torch.float32 and parameter.is_floating_point()
            dtype = self.dtype if is_cast else parameter.dtype
            # Only the pages of the partition are written, so on a CPU the rest takes no memory.
            whole = torch.empty(parameter.shape, dtype=dtype, device=self.local_device)
            whole.view(-1)[start : start + count] = drawn
            filled = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            # torch leaves it untyped
            torch.utils.swap_tensors(parameter, filled)  # type: ignore[no-untyped-call]
            if self.dtype != torch.float32 and parameter.requires_grad:
                self.exact[name] = drawn.to(torch.float32, copy=True)
            # Freed before DeepSpeed copies the partition, and before the next one comes.
            del drawn, whole, filled
            self._convert_to_deepspeed_param(parameter)
            parameter.partition()

    def _interval(self, elements: int) -> tuple[int, int]:
        """Return start and length of this rank's partition, without padding.

        With secondary partitions it is the whole parameter.
        """
        if self.zero_param_process_group is not None:
            return 0, elements
        size = -(-elements // self.dp_world_size)
        start = min(size * self.rank, elements)
        return start, min(size, elements - start)
