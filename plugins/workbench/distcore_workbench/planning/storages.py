"""Track the memory of each operation on tensors without values.

Every storage is counted from the operation that makes it until nobody refers to it, of tensors
with values and of those without.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distcore.engine.tracing import FakeTensors
from distcore_workbench.planning.workspace import workspace

aten = torch.ops.aten
COPIED = ("reduce_scatter", "allgather", "all_gather")
"""Collectives for which gloo makes a copy of the whole tensor, which lives until they are done."""


class Storages(FakeTensors):  # type: ignore[no-untyped-call]  # torch leaves its base untyped
    """Counts the bytes of every storage that the operations under it make."""

    def __init__(self, copies: bool = True, threads: int | None = None) -> None:
        """``copies``: collectives are gloo's, which copies the tensors that some of them send.

        ``threads``: threads of the kernels on this processor; ``None``: the working memory of
        kernels does not count.
        """
        super().__init__()
        self.changes: list[tuple[int, int]] = []
        """The changes in order: the number of a storage, and by how many bytes it grew."""
        self._copied = COPIED if copies else ()
        self._threads = threads
        self._counts = True
        self._of_parts = False
        self._sum: tuple[int | None, int] = (None, 0)
        self._numbers: dict[int, int] = {}
        self._sizes: list[int] = []
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextmanager
    def tracing(self) -> Iterator[Self]:
        """Have tensors made inside be without values, and count them."""
        resize = torch.UntypedStorage.resize_
        shape_of = ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._count(storage)
            return result

        def shape(*arguments: Any) -> Any:
            self._counts = False
            try:
                return shape_of(*arguments)
            finally:
                self._counts = True

        # no operation: no mode hears of it
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        # DTensor finds the shape of a whole result by computing it without values: that never
        # is in memory.
        ShardingPropagator._propagate_tensor_meta_non_cached = shape  # type: ignore[method-assign, assignment]
        try:
            with super().tracing():
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            ShardingPropagator._propagate_tensor_meta_non_cached = shape_of  # type: ignore[method-assign]

    def without_values(self, meta_model: nn.Module) -> nn.Module:
        """Return a copy of ``meta_model`` on a CPU without memory, whose tensors are counted."""
        module = super().without_values(meta_model)
        self.count(chain(module.parameters(), module.buffers()))
        return module

    def on_parts(self, func: Any) -> None:
        """Note a sum of two tensors with parts."""
        self._of_parts |= func is aten.add.Tensor

    def on_operation(
        self, func: Any, args: Any, tensors: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """Count the tensors that an operation made, and the memory it had only while it ran."""
        if any(name in str(func) for name in self._copied):
            self._borrow(max(tensor.nbytes for tensor in (*tensors, *made)))
        self.count(made)
        if self._threads is not None and self._counts:
            workspace_bytes = workspace(func, args, self._threads)
            if workspace_bytes:
                self._borrow(workspace_bytes)
        if func is aten.add.Tensor:
            self._note_sum(args[0])

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors, each once; a tensor on the meta device is in no memory."""
        if not self._counts:
            return
        for tensor in tensors:
            if tensor.device.type != "meta":
                self._count(tensor.untyped_storage())

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the numbers of the storages of tensors, and of the parts of DTensors.

        Storages that were not counted are left out.
        """
        plain_tensors = [part for tensor in tensors for part in parts(tensor)]
        keys = [id(tensor.untyped_storage()) for tensor in plain_tensors]
        return {self._numbers[key] for key in keys if key in self._numbers}

    def _note_sum(self, first: Tensor) -> None:
        """Remember a sum that autograd may have made in backward: of two gradients of one tensor.

        In a run, autograd adds to the first gradient in place if nothing else holds it. On tensors
        without values it never does, so a trace frees the first gradient after the sum. A run does
        not add in place to a DTensor or to a view, such as the gradient of a linear layer's weight.
        """
        is_of_autograd = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        is_in_place = is_of_autograd and not self._of_parts and not first._is_view()
        number = self._numbers.get(id(first.untyped_storage())) if is_in_place else None
        self._of_parts = False
        self._sum = (number, len(self.changes))

    def _borrow(self, size: int) -> None:
        """Count ``size`` bytes that live no longer than an operation."""
        number = len(self._sizes)
        self._sizes.append(0)
        self._change(number, size)
        self._change(number, 0)

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it is freed; one that was counted, by its size of now."""
        key = id(storage)
        size = storage.nbytes()
        if key not in self._numbers:
            self._numbers[key] = len(self._sizes)
            self._sizes.append(0)
            self._references[key] = weakref.ref(storage, self._on_free(key))
        self._change(self._numbers[key], size)

    def _change(self, number: int, size: int) -> None:
        """Note that the storage ``number`` has ``size`` bytes from now on."""
        change = size - self._sizes[number]
        if not change:
            return
        index = len(self.changes)
        if (number, index) == self._sum and self.changes[-1][1] == -change:
            index -= 1  # freed as if before the sum: they are one
        self.changes.insert(index, (number, change))
        self._sizes[number] = size

    def _on_free(self, key: int) -> Callable[[object], None]:
        """Return a callback that counts a storage as freed.

        It drops the number of the storage, since another one may get the same ``id`` later.
        """

        def count_free(_reference: object) -> None:
            self._references.pop(key, None)
            self._change(self._numbers.pop(key), 0)

        return count_free


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of a tensor: itself, or those that a subclass wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inside = (getattr(tensor, name) for name in names)
    return [part for value in inside if isinstance(value, Tensor) for part in parts(value)]
