"""Record how a model initializes its tensors, without allocating them.

The model is built on torch's fake tensors, which have shapes but no memory. Every operation
that writes is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from distcore.errors import MetaModelError
from distcore.launchers.processes.failures import one_line

OVERWRITES = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_"}
)
"""Operations that overwrite every element of their first argument without reading it."""
UNKNOWN = frozenset({"resize_", "resize_as_", "set_"})
"""Operations that change a tensor's storage or size, which a recording cannot express."""


@dataclass(frozen=True)
class View:
    """A tensor as a part of a storage; it replaces the tensor in a recording."""

    storage: int
    """Number of the storage, in order of first use."""
    dtype: torch.dtype
    """Dtype of the elements."""
    offset: int
    """Elements of the storage before it."""
    size: tuple[int, ...]
    """Shape of the tensor."""
    stride: tuple[int, ...]
    """Elements of the storage from one index to the next, by dimension."""

    def in_storage(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor in a storage with memory."""
        tensor = torch.empty(0, dtype=self.dtype)
        return tensor.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Operation:
    """A recorded operation that writes; arguments are constants, and views in place of tensors."""

    function: Any
    """The operator of torch, one overload of it."""
    arguments: tuple[Any, ...]
    """Positional arguments."""
    named: dict[str, Any]
    """Keyword arguments."""
    made: tuple[View | None, ...]
    """Result tensors; ``None`` for a result in an older storage."""
    reads: frozenset[int]
    """Storages whose values it needs. A storage that it changes only in part is among them."""
    writes: frozenset[int]
    """Storages that it changes or makes."""
    is_random: bool
    """True if it draws random numbers."""


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """A dispatch mode that records every write, inside of ``FakeTensorMode``."""

    def __init__(self) -> None:
        """Begin without operations, and take over the state of torch's generator."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.sizes: list[int] = []
        """Bytes of each storage."""
        self._numbers: dict[int, int] = {}
        # Kept, because a freed storage's address could be reused by another one.
        self._alive: list[torch.UntypedStorage] = []
        self._draws = 0
        self._mark_generator()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on fake tensors, and record it if it writes."""
        named: dict[str, Any] = kwargs or {}
        result = func(*args, **named)
        old = {self.view(tensor).storage for tensor in _fakes((args, named))}
        results = [self.view(tensor) for tensor in _fakes(result)]
        made = tuple(None if view.storage in old else view for view in results)
        changed = [self.view(tensor) for tensor in _changed(func, args, named)]
        new = {view.storage for view in made if view is not None}
        if not new and not changed:
            return result
        # An overwritten storage needs no earlier value, unless another argument reads it:
        # x.copy_(x.T).
        overwritten = {view.storage for view in changed if self._is_overwritten(func, view)}
        other_arguments = (args[1:], named)
        others = {self.view(tensor).storage for tensor in _fakes(other_arguments)}
        arguments, keywords = tree_map_only(FakeTensor, self.view, (args, named))
        operation = Operation(
            function=func,
            arguments=arguments,
            named=keywords,
            made=made,
            reads=frozenset(old - (overwritten - others)),
            writes=frozenset(new | {view.storage for view in changed}),
            is_random=self._is_random(func, named),
        )
        self.operations.append(operation)
        return result

    def view(self, tensor: Tensor) -> View:
        """Return a fake tensor as a part of its storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self._alive.append(storage)
        return View(
            storage=self._numbers[storage._cdata],
            dtype=tensor.dtype,
            offset=int(tensor.storage_offset()),
            size=tuple(tensor.shape),
            stride=tensor.stride(),
        )

    def check_generator(self) -> None:
        """Raise MetaModelError if the model has set the generator's state, instead of drawing."""
        if not torch.equal(torch.default_generator.get_state(), self._state):
            raise MetaModelError("build_model() sets the state of torch's random numbers itself")

    def _is_overwritten(self, function: Any, view: View) -> bool:
        """Return True if an operation writes every element of the storage without reading it."""
        name = function.overloadpacket.__name__
        if name in UNKNOWN:
            raise MetaModelError(f"build_model() changes the storage of a tensor ({name})")
        bytes_written = torch.Size(view.size).numel() * view.dtype.itemsize
        return (
            name in OVERWRITES
            and 0 not in view.stride
            and bytes_written == self.sizes[view.storage]
        )

    def _is_random(self, function: Any, named: dict[str, Any]) -> bool:
        """Return True if an operation draws random numbers, and mark the generator after it."""
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return False
        if named.get("generator") is not None:
            raise MetaModelError("build_model() draws random numbers from a generator of its own")
        with torch.utils._python_dispatch._disable_current_modes():
            self.check_generator()
            self._mark_generator()
        return True

    def _mark_generator(self) -> None:
        """Give the generator a new state: fake tensors never advance it, only the model can."""
        self._draws += 1
        torch.default_generator.manual_seed(self._draws)
        self._state = torch.default_generator.get_state()


def record(build: Callable[[], nn.Module]) -> tuple[Recording, dict[str, View], dict[str, View]]:
    """Record ``build``; return the recording, and the views of parameters and buffers by name.

    Raises MetaModelError for a model with values of another origin, or whose code needs values.
    """
    before = torch.default_generator.get_state()
    try:
        recording = Recording()
        with FakeTensorMode(), recording:
            module = build()
        recording.check_generator()
    except MetaModelError:
        raise
    except Exception as error:
        # Of any kind: the task's own code computes with tensors that have no values.
        reason = one_line(f"{type(error).__name__}: {error}", limit=200)
        raise MetaModelError(f"build_model() needs the values of tensors: {reason}") from error
    finally:
        torch.default_generator.set_state(before)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not isinstance(tensor, FakeTensor):
            raise MetaModelError(f"build_model() takes the values of {name} from elsewhere")
    parameters = {name: recording.view(tensor) for name, tensor in module.named_parameters()}
    buffers = {name: recording.view(tensor) for name, tensor in module.named_buffers()}
    return recording, parameters, buffers


def _fakes(tree: Any) -> Iterator[FakeTensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, FakeTensor))


def _changed(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Iterator[FakeTensor]:
    """Yield the tensors that an operation writes to, as its schema says."""
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[number] if number < len(args) else named.get(argument.name)
            yield from _fakes(written)
