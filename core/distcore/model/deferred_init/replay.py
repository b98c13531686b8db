"""Give a model its random weights one tensor at a time, bit for bit those of building it whole.

What building does is noted on tensors without memory, then done again in the same order, from the same seed. Of what
is written more than once only the last values are kept; of what else is random the numbers are passed over, so that
those behind them are the same. A tensor that one operation draws is drawn as far as it is wanted. Any other is made
whole, and given away as soon as nothing reads or writes it any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from distcore.errors import MetaModelError
from distcore.model.deferred_init.partial_init import draw, drawn_by
from distcore.model.deferred_init.recording import Operation, Recording, View, record
from distcore.plugin.strategy.contract import LocalRange, WeightStream

Storages = dict[int, torch.UntypedStorage]


def replay_build(build: Callable[[], nn.Module], meta_model: nn.Module, seed: int) -> tuple[nn.Module, WeightStream]:
    """Return ``meta_model``, whose buffers have the values that ``build`` gives them, and what its parameters get.

    ``build`` draws its random numbers under ``seed``, which it does not set. Raises MetaModelError, with the reason,
    where the values cannot be told without building the model whole.
    """
    recording, parameters, buffers = record(build)
    for kind, noted, own in (
        ("parameter", parameters, dict(meta_model.named_parameters())),
        ("buffer", buffers, dict(meta_model.named_buffers())),
    ):
        if {name: (v.size, v.dtype) for name, v in noted.items()} != {
            n: (tuple(t.shape), t.dtype) for n, t in own.items()
        }:
            raise MetaModelError(f"build_model() gives a model another {kind} on the meta device")
    made = Replay(recording, buffers, draws=False).values(lambda name: (0, torch.Size(buffers[name].size).numel()))
    _set_buffers(meta_model, {name: value.clone().view(buffers[name].size) for name, value in made})
    replay = Replay(recording, parameters)

    def values(wanted: LocalRange) -> Iterator[tuple[str, Tensor]]:
        torch.manual_seed(seed)
        return replay.values(wanted)

    return meta_model, values


class Replay:
    """The operations that give some tensors their values, and how long each storage is needed."""

    def __init__(self, recording: Recording, wanted: dict[str, View], draws: bool = True) -> None:
        """Find what ``wanted``, tensors by name, needs of a recording.

        With ``draws`` all the random numbers of the recording are drawn, so that those needed are the right ones; else
        none. Raises MetaModelError for what is needed and cannot be repeated, or not without them.
        """
        self._operations, self._sizes, self._wanted = recording.operations, recording.sizes, wanted
        self._draws = draws
        needed = {view.storage for view in wanted.values()}
        self._is_needed = [False] * len(self._operations)
        self._ends: dict[int, list[int]] = defaultdict(list)
        """The storages that nothing needs behind an operation, by its number."""
        seen: set[int] = set()
        for number in reversed(range(len(self._operations))):
            operation = self._operations[number]
            is_wanted = bool(operation.writes & needed)
            if is_wanted and operation.is_random and not draws:
                raise MetaModelError("build_model() gives a buffer random values")
            # A random operation on values may draw as many numbers as these say.
            if is_wanted or (draws and operation.is_random and operation.reads):
                self._is_needed[number] = True
                needed = (needed - operation.writes) | operation.reads
                touched = operation.writes | operation.reads
                self._ends[number] += sorted(touched - seen)
                seen |= touched
        if missing := [name for name, view in wanted.items() if view.storage not in seen]:
            raise MetaModelError(f"build_model() gives {missing[0]} values in a way that cannot be repeated")

    def values(self, wanted: LocalRange) -> Iterator[tuple[str, Tensor]]:
        """Yield of each tensor its name and the elements that are ``wanted``, flattened, as soon as they are done.

        What was yielded is not kept: it has its memory until who asked lets go of it.
        """
        names = defaultdict(list)
        for name, view in self._wanted.items():
            names[view.storage].append(name)
        storages: Storages = {}
        for number, operation in enumerate(self._operations):
            drawn = drawn_by(operation) if self._draws else None
            if not self._is_needed[number]:
                if drawn is not None:
                    draw(operation, 0, 0)
                elif self._draws and operation.is_random:
                    self._run(operation, {})  # for the numbers that it draws
            elif drawn is not None and drawn.storage not in storages and self._is_all_of(drawn, names, number):
                name = names[drawn.storage][0]
                yield name, draw(operation, *wanted(name))
            else:
                self._run(operation, storages)
                for ended in self._ends[number]:
                    for name in names[ended]:
                        start, count = wanted(name)
                        yield name, self._wanted[name].of(storages[ended]).reshape(-1)[start : start + count]
                    del storages[ended]

    def _is_all_of(self, drawn: View, names: dict[int, list[str]], number: int) -> bool:
        """Return whether ``drawn`` is all that is wanted of its storage, with the values that operation gives it."""
        wanted = [self._wanted[name] for name in names[drawn.storage]]
        return wanted == [drawn] and self._ends[number] == [drawn.storage]

    @torch.no_grad()  # not around ``values``: torch's wrapper of a generator keeps what it has yielded last
    def _run(self, operation: Operation, storages: Storages) -> None:
        def real(value: Any) -> Any:
            if not isinstance(value, View):
                return value
            if value.storage not in storages:
                storages[value.storage] = _storage(self._sizes[value.storage])
            return value.of(storages[value.storage])

        arguments, named = tree_map(real, (operation.arguments, operation.named))
        result = operation.function(*arguments, **named)
        results = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        for view, tensor in zip(operation.made, results, strict=True):
            if view is not None:
                storage = _storage(self._sizes[view.storage])
                storages[view.storage] = storage
                view.of(storage).copy_(tensor)


def _storage(size: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(size)  # type: ignore[no-untyped-call]


def _set_buffers(meta_model: nn.Module, values: dict[str, Tensor]) -> None:
    named = {id(buffer): values[name] for name, buffer in meta_model.named_buffers()}
    for name, buffer in list(meta_model.named_buffers(remove_duplicate=False)):
        path, _, attribute = name.rpartition(".")
        setattr(meta_model.get_submodule(path), attribute, named[id(buffer)])
