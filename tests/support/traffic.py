"""Notes what torch's collectives exchange in this thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The collectives that run inside of it, in order: operation, dtype and number of elements.

    A CPU's backward pass runs in the thread that starts it, so the collectives of
    gradients are noted, too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "c10d":
            tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
            largest = max(tensors, key=Tensor.numel, default=torch.empty(0))
            self.sent.append((func._opname, largest.dtype, largest.numel()))
        return func(*args, **(kwargs or {}))

    def dtypes(self, operation: str) -> set[torch.dtype]:
        """Return the dtypes that an operation exchanged."""
        return {dtype for name, dtype, _ in self.sent if name == operation}

    def count(self, operation: str) -> int:
        """Return how often an operation ran."""
        return sum(name == operation for name, *_ in self.sent)
