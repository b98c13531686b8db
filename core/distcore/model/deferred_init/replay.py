"""Draw a model's random weights one tensor at a time, bit for bit as a whole build draws them.

The build is recorded on tensors without memory, then replayed in the same order, from the same
seed. Only the last write to each tensor is kept. Other random operations still consume their
numbers, so later draws match. If a single operation draws a tensor, only the wanted elements are
drawn. Any other tensor is built whole, yielded after its last use, and freed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from distcore.errors import MetaModelError
from distcore.model.deferred_init.partial_init import draw, drawn_by
from distcore.model.deferred_init.recording import Operation, Recording, View, record
from distcore.plugin.strategy.contract import LocalRange, WeightStream

Storages = dict[int, torch.UntypedStorage]


def replay_build(
    build: Callable[[], nn.Module], meta_model: nn.Module, seed: int
) -> tuple[nn.Module, WeightStream]:
    """Give ``meta_model`` the buffers of ``build``; return it, and a stream of parameters' values.

    ``build`` draws random numbers under ``seed``, but does not set it. Raises MetaModelError, with
    the reason, if the values require a whole build.
    """
    recording, parameters, buffers = record(build)
    _check_is_alike("parameter", parameters, dict(meta_model.named_parameters()))
    _check_is_alike("buffer", buffers, dict(meta_model.named_buffers()))

    def whole_buffer(name: str) -> tuple[int, int]:
        return 0, torch.Size(buffers[name].size).numel()

    values_of = {}
    for name, value in Replay(recording, buffers, draws=False).values(whole_buffer):
        values_of[name] = value.clone().view(buffers[name].size)
    # By identity, so that a shared buffer stays shared.
    new_buffers = {id(buffer): values_of[name] for name, buffer in meta_model.named_buffers()}
    for name, buffer in list(meta_model.named_buffers(remove_duplicate=False)):
        path, _, attribute = name.rpartition(".")
        setattr(meta_model.get_submodule(path), attribute, new_buffers[id(buffer)])
    replay = Replay(recording, parameters)

    def values(wanted: LocalRange) -> Iterator[tuple[str, Tensor]]:
        torch.manual_seed(seed)
        return replay.values(wanted)

    return meta_model, values


def _check_is_alike(kind: str, recorded: dict[str, View], of_model: Mapping[str, Tensor]) -> None:
    """Raise MetaModelError if the build on the meta device made other tensors than the recorded."""
    recorded_forms = {}
    for name, view in recorded.items():
        recorded_forms[name] = (view.size, view.dtype)
    forms = {}
    for name, tensor in of_model.items():
        forms[name] = (tuple(tensor.shape), tensor.dtype)
    if recorded_forms != forms:
        raise MetaModelError(f"build_model() gives a model another {kind} on the meta device")


class Replay:
    """The operations that produce some tensors, and the lifetime of each storage."""

    def __init__(self, recording: Recording, wanted: dict[str, View], draws: bool = True) -> None:
        """Find the operations of a recording that produce ``wanted``, tensors by name.

        With ``draws`` all random numbers of the recording are drawn, so that the needed ones are
        right; otherwise none. Raises MetaModelError for a tensor that cannot be replayed, or that
        is random without ``draws``.
        """
        self._operations = recording.operations
        self._sizes = recording.sizes
        self._wanted = wanted
        self._draws = draws
        needed = {view.storage for view in wanted.values()}
        self._is_needed = [False] * len(self._operations)
        self._ends: dict[int, list[int]] = defaultdict(list)
        """Storages whose last use is an operation, by the operation's number."""
        seen: set[int] = set()
        # In reverse, as in dead-code elimination: a write is needed if a later needed operation
        # reads its storage, and the first use met on the way back is the last use of a storage,
        # where ``values`` frees it.
        for number in reversed(range(len(self._operations))):
            operation = self._operations[number]
            is_wanted = bool(operation.writes & needed)
            if is_wanted and operation.is_random and not draws:
                raise MetaModelError("build_model() gives a buffer random values")
            # How many numbers a random operation draws may depend on the values that it reads, so
            # it needs them.
            if is_wanted or (draws and operation.is_random and operation.reads):
                self._is_needed[number] = True
                needed = (needed - operation.writes) | operation.reads
                touched = operation.writes | operation.reads
                self._ends[number] += sorted(touched - seen)
                seen |= touched
        if missing := [name for name, view in wanted.items() if view.storage not in seen]:
            raise MetaModelError(
                f"build_model() gives {missing[0]} values in a way that cannot be repeated"
            )

    def values(self, wanted: LocalRange) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and its ``wanted`` elements, flat, as soon as they are final.

        A yielded tensor is not kept: its memory is freed when the caller drops it.
        """
        names = defaultdict(list)
        for name, view in self._wanted.items():
            names[view.storage].append(name)
        storages: Storages = {}
        for number, operation in enumerate(self._operations):
            drawn = drawn_by(operation) if self._draws else None
            if not self._is_needed[number]:
                if drawn is not None:
                    draw(operation, 0, 0)  # overwritten later, but its numbers must be consumed
                elif self._draws and operation.is_random:
                    self._run(operation, {})  # consumes its numbers
                continue
            if (
                drawn is not None
                and drawn.storage not in storages
                and self._is_all_of(drawn, names, number)
            ):
                name = names[drawn.storage][0]
                yield name, draw(operation, *wanted(name))
                continue
            self._run(operation, storages)
            for ended in self._ends[number]:
                for name in names[ended]:
                    start, count = wanted(name)
                    # Not in a variable, which would keep the tensor alive in this frame.
                    yield name, self._flat(name, storages[ended])[start : start + count]
                del storages[ended]

    def _flat(self, name: str, storage: torch.UntypedStorage) -> Tensor:
        """Return a wanted tensor, flattened, from its storage."""
        return self._wanted[name].in_storage(storage).reshape(-1)

    def _is_all_of(self, drawn: View, names: dict[int, list[str]], number: int) -> bool:
        """Return True if operation ``number`` draws a wanted tensor, and nothing else needs it."""
        wanted = [self._wanted[name] for name in names[drawn.storage]]
        return wanted == [drawn] and self._ends[number] == [drawn.storage]

    # Not on ``values``: torch's wrapper of a generator keeps the last yielded tensor alive.
    @torch.no_grad()
    def _run(self, operation: Operation, storages: Storages) -> None:
        """Run an operation on the memory of ``storages``, and add those that it makes."""

        def real(value: View) -> Tensor:
            if value.storage not in storages:
                storages[value.storage] = _storage(self._sizes[value.storage])
            return value.in_storage(storages[value.storage])

        arguments, named = tree_map_only(View, real, (operation.arguments, operation.named))
        result = operation.function(*arguments, **named)
        results = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        for view, tensor in zip(operation.made, results, strict=True):
            if view is not None:
                storage = _storage(self._sizes[view.storage])
                storages[view.storage] = storage
                view.in_storage(storage).copy_(tensor)


def _storage(size: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
