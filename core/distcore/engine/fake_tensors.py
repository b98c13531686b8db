"""Run a step's code on tensors that have shapes but no values, for tools that measure the step.

A tensor made from the batch alone keeps its values, so a loss may choose tokens by a mask or count
them. All that comes from a parameter is a fake tensor of torch's FakeTensorMode.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
"""Operations that take masks as indices."""


class FakeTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Runs operations without values. A subclass may look at each of them."""

    def __init__(self) -> None:
        """Nothing is fake until ``tracing`` is entered."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        """The mode that makes tensors without values."""

    @contextmanager
    def tracing(self) -> Iterator[Self]:
        """Have tensors made inside be without values; random state is afterward as before."""
        with torch.random.fork_rng(devices=[]), self.fakes, self:
            yield self

    def on_operation(
        self, func: Any, args: Any, tensors: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """Look at an operation that is done: all ``tensors`` among its arguments, and its
        results.
        """

    def on_parts(self, func: Any) -> None:
        """Look at an operation on a tensor with parts, such as a DTensor, before those on
        its parts.
        """

    def without_values(self, meta_model: nn.Module) -> nn.Module:
        """Return a copy of ``meta_model`` on a CPU without memory; tied parameters stay tied."""
        module = copy.deepcopy(meta_model)
        made: dict[int, Tensor] = {}

        def on_cpu(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                with self.fakes:
                    copy_ = torch.empty_strided(
                        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
                    )
                if isinstance(tensor, nn.Parameter):
                    copy_ = nn.Parameter(copy_, requires_grad=tensor.requires_grad)
                made[id(tensor)] = copy_
            return made[id(tensor)]

        for part in module.modules():
            for kept in (part._parameters, part._buffers):
                for name, tensor in kept.items():
                    if tensor is not None:
                        kept[name] = on_cpu(tensor)  # type: ignore[assignment]
        # torch cannot move such a tensor, not even to where it is.
        vars(module)["to"] = lambda *_args, **_kwargs: module
        return module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_has_parts(kind) for kind in types):
            self.on_parts(func)
            return NotImplemented  # such as a DTensor: its own parts come back here
        kwargs = kwargs or {}
        tensors = _tensors_in((args, kwargs))
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if is_fake and func is aten._local_scalar_dense.default:
            return _number_for(args[0])
        if not is_fake and (tensors or _is_whole(func, args, kwargs)):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        else:
            args_to_fake = args
            if func in INDEXED:
                args_to_fake = (args[0], _as_rows(args[1]), *args[2:])
            result = func(*args_to_fake, **kwargs)
        self.on_operation(func, args, tensors, _tensors_in(result))
        return result


def _tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a nesting of containers."""
    leaves, _ = tree_flatten(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _number_for(tensor: Tensor) -> bool | float | int:
    """Return a number in place of the value of a tensor that has none.

    Code asks for a truth value to detect errors, such as an overflow: False is the usual answer.
    """
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.is_floating_point() else 1


def _has_parts(kind: type) -> bool:
    """Return True for a subclass of tensor that is made of plain ones."""
    return (
        issubclass(kind, Tensor)
        and hasattr(kind, "__tensor_flatten__")
        and not issubclass(kind, FakeTensor)
    )


def _is_whole(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True for a function that makes integers or truth values from
    no tensor: positions, masks.

    Bytes are no such numbers, but weights in few bits.
    """
    kind = kwargs.get("dtype")
    if kind is None:
        return (
            func is aten.arange.default
            or func is aten.arange.start
            or func is aten.arange.start_step
        )
    return not kind.is_floating_point and not kind.is_complex and kind is not torch.uint8


def _as_rows(indices: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return indices with each mask that has values as one index per dimension: the selection
    has a known shape.
    """
    plain: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype is not torch.bool or isinstance(index, FakeTensor):
            plain.append(index)
        else:
            with unset_fake_temporarily():
                plain += index.nonzero().unbind(1)
    return plain
