"""A tensor whose values are computed when read, so a checkpoint holds one moment at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_RESHAPES = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


class Deferred(Tensor):
    """A tensor that takes no memory: each operation computes its values, except reshaping."""

    _compute: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, compute: Callable[[], Tensor], shape: Sequence[int], device: torch.device
    ) -> Deferred:
        """Take a function that returns the values, fp32, with as many elements as ``shape`` has."""
        tensor: Deferred = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=torch.float32, device=device
        )
        tensor._compute = compute
        return tensor

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
            tensor, shape = args
            # torch resolves a -1 of the new shape.
            reshaped = torch.empty(tensor.shape, device="meta").view(shape)
            return cls(tensor._compute, reshaped.shape, tensor.device)
        if func._schema.is_mutable and isinstance(args[0], Deferred):
            raise NotImplementedError(f"{func}: a deferred tensor has no memory to write to")
        args, kwargs = tree_map(_computed, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _computed(value: Any) -> Any:
    """Return the values of a deferred tensor, and anything else as it is."""
    return value.values() if isinstance(value, Deferred) else value
