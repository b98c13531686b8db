"""Keep activations in main memory between the forward and the backward pass of a micro-batch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from distcore import ConfigError, RunConfig, hookimpl

Packed = Tensor | tuple[torch.device, Tensor]
"""A tensor as autograd keeps it: itself, or its device and a copy of it in main memory."""


@dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """Copy what autograd saves to main memory, and back for the backward pass.

    Values and so results stay the same. Copies are ordered with the computation, on its stream.
    With recomputation only the inputs of blocks are saved, and copied.
    """

    least_bytes: Annotated[int, Field(ge=0)] = 2**20
    """Smaller tensors stay on the device."""

    def check_config(self, config: RunConfig) -> None:
        """Raise ConfigError on a CPU."""
        if config.device == "cpu":
            raise ConfigError("extensions.activation_offload: does nothing on a CPU; leave it out")

    @hookimpl(wrapper=True)
    def accumulate(
        self,
    ) -> Generator[None, AbstractContextManager[object], AbstractContextManager[object]]:
        """Add the copies to the context of a micro-batch."""
        context = yield
        return self._within(context)

    @contextmanager
    def _within(self, context: AbstractContextManager[object]) -> Iterator[None]:
        with context, saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Packed:
        """Return what is kept of a saved tensor.

        A parameter, or a view of one, is on the device anyway.
        """
        if tensor.nbytes < self.least_bytes or any(
            isinstance(it, nn.Parameter) for it in (tensor, tensor._base)
        ):
            return tensor
        on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
        return tensor.device, on_host.copy_(tensor, non_blocking=True)

    def unpack(self, packed: Packed) -> Tensor:
        """Return the saved tensor on its device."""
        if isinstance(packed, Tensor):
            return packed
        device, on_host = packed
        return on_host.to(device, non_blocking=True)
