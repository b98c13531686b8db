"""A tensor whose values are computed when they are read, so a checkpoint holds one
moment at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_RESHAPES = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


class Deferred(Tensor):
    """A tensor that takes no memory. Each operation on it computes the values anew;
    reshaping keeps it deferred.
    """

    _compute: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, compute: Callable[[], Tensor], shape: Sequence[int], device: torch.device
    ) -> Deferred:
        """Take a function that returns the values, fp32, with as many elements as ``shape`` has."""
        made: Deferred = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=torch.float32, device=device
        )
        made._compute = compute
        return made

    def values(self) -> Tensor:
        """Return the tensor, computed now."""
        return self._compute().view(self.shape)

    @classmethod
    # torch's annotation is not that of a class method
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute what ``func`` reads; it cannot write into a deferred tensor."""
        if func in _SAME:
            return args[0]
        if func in _RESHAPES:
            meta = torch.empty(args[0].shape, device="meta").view(args[1])
            return cls(args[0]._compute, meta.shape, args[0].device)
        if func._schema.is_mutable and isinstance(args[0], Deferred):
            raise NotImplementedError(f"{func}: a deferred tensor has no memory to write to")
        args, kwargs = tree_map(
            lambda value: value.values() if isinstance(value, Deferred) else value, (args, kwargs)
        )
        return func(*args, **(kwargs or {}))
