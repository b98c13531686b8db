"""Pipeline parallelism: each rank of a group, a stage, holds and computes some of a model's blocks.

The forward pass runs the model's own code on every stage. Where a block of another stage was stands a module without
parameters: the one before a stage's own blocks receives the hidden state, the one behind them sends it on. What comes
before the blocks, such as embeddings, belongs to the first stage; what comes behind them, such as the head, to the
last. On other stages these modules compute with zeros that take no memory, so that all shapes are right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from distcore import StrategyError, repeated_classes
from distcore_mesh.absent import Absent, hollow


class SentError(Exception):
    """Ends a forward pass in training on a stage that is not the last: what follows is computed elsewhere."""


@dataclass(eq=False)
class Stage:
    """One stage of a model, and what it exchanges with the stages before and behind it."""

    rank: int
    """Number of the stage."""
    size: int
    """Number of stages."""
    activations: dist.ProcessGroup
    """The ranks that hold the stages of one replica; hidden states go from each to the next."""
    gradients: dist.ProcessGroup
    """The same ranks, connected a second time, so that neither direction waits for the other."""
    schedule: str
    """In which order it runs its passes: ``1f1b`` or ``gpipe``."""
    in_training: bool = field(default=False, init=False)
    """Whether hidden states are kept for a backward pass."""
    has_run: bool = field(default=False, init=False)
    """Whether the model was called for the micro-batch that is computed."""
    past: bool | None = field(default=None, init=False)
    """Whether the forward pass that runs is past this stage's first exchange; ``None``: none runs."""
    received: Tensor | None = field(default=None, init=False)
    """What came from the stage before, in the forward pass that ran last."""
    sent: Tensor | None = field(default=None, init=False)
    """What went to the next stage."""
    _leaving: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque, init=False)
    """What is being sent: a tensor must live until it has arrived."""

    @property
    def is_last(self) -> bool:
        """True on the stage that computes the loss."""
        return self.rank == self.size - 1

    def take(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the hidden state of the stage before, which has the shape of ``like``."""
        self.past = True
        hidden = self._receive(torch.empty(like.shape, dtype=dtype, device=like.device), self.rank - 1)
        self.received = hidden.requires_grad_(self.in_training)
        return self.received

    def hand_on(self, hidden: Tensor) -> Tensor:
        """Send the hidden state to the next stage; return zeros of its shape, of which nothing is computed."""
        self.past = True
        self.sent = hidden
        self._send(hidden.detach(), self.rank + 1, self.activations)
        return hidden.new_zeros(()).expand(hidden.shape)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of what was received to the stage that sent it."""
        self._send(gradient, self.rank - 1, self.gradients)

    def receive_gradient(self, sent: Tensor) -> Tensor:
        """Return the gradient of what was sent."""
        return self._receive(torch.empty(sent.shape, dtype=sent.dtype, device=sent.device), self.rank + 1, True)

    def wait(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._leaving:
            self._leaving.popleft()[0].wait()

    def _send(self, tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
        if len(self._leaving) > self.size:  # a stage that runs ahead keeps only so much alive
            self._leaving.popleft()[0].wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=group, group_dst=to)
        assert work is not None  # this rank is in the group
        self._leaving.append((work, tensor))

    def _receive(self, into: Tensor, source: int, gradient: bool = False) -> Tensor:
        work = dist.irecv(into, group=self.gradients if gradient else self.activations, group_src=source)
        assert work is not None
        work.wait()
        return into


def stage_of(mesh: DeviceMesh, schedule: str) -> Stage:
    """Return this rank's stage in a mesh whose first dimension, ``pp``, has the stages; every rank calls."""
    own = mesh["pp"]
    rows = mesh.mesh.movedim(0, -1).reshape(-1, own.size()).tolist()
    gradients, _ = dist.new_subgroups_by_enumeration(rows)  # type: ignore[no-untyped-call]
    assert gradients is not None  # the rows have every rank
    return Stage(own.get_local_rank(), own.size(), own.get_group(), gradients, schedule)


def of_stage(optimizer: Optimizer, whole: Mapping[str, nn.Parameter], model: nn.Module) -> Optimizer:
    """Have an optimizer step what ``model`` has left of the ``whole`` model's parameters, by their names.

    Its groups stay: they say which learning rate a parameter has by the names and the number of blocks of the whole.
    """
    names = {parameter: name for name, parameter in whole.items()}
    left = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [left[names[each]] for each in group["params"] if names[each] in left]
    return optimizer


def check_stages(model: nn.Module, pp: int) -> None:
    """Raise StrategyError, one line, unless ``pp`` ranks can share the blocks of ``model``, also of a skeleton."""
    where = f"strategy_options.pp = {pp}"
    path, blocks = _stack(model, where)
    if len(blocks) % pp:
        possible = ", ".join(str(number) for number in range(1, len(blocks) + 1) if len(blocks) % number == 0)
        raise StrategyError(f"{where}: must divide the model's {len(blocks)} blocks (possible: {possible})")
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (other := first.setdefault(id(parameter), name)) != name:
            raise StrategyError(
                f"{where}: {other} and {name} are one weight, which two stages cannot share; untie them"
            )
    for owner in _ancestors(path):
        if own := next(model.get_submodule(owner).named_parameters(recurse=False), None):
            raise StrategyError(f"{where}: {own[0]!r} of {type(model.get_submodule(owner)).__name__} is in no stage")
    state = model.state_dict().keys()
    buffers = [name for name, _ in model.named_buffers() if name in state and _is_inside(name, path)]
    if buffers:
        raise StrategyError(f"{where}: {buffers[0]} is a running statistic of a block, which other stages cannot see")


def cut_into_stages(model: nn.Module, stage: Stage, dtype: torch.dtype, device: torch.device) -> frozenset[str]:
    """Leave in ``model`` what ``stage`` holds, in place; return the names of its parameters.

    ``dtype`` is what parameters are computed in, on ``device``. Raises StrategyError as ``check_stages`` does.
    """
    check_stages(model, stage.size)
    path, blocks = _stack(model, "")
    before, behind = _around(model, path)
    own = len(blocks) // stage.size
    first, last = stage.rank * own, (stage.rank + 1) * own
    kept = {f"{path}.{number}".lstrip(".") for number in range(first, last)}
    for names, is_kept, misplaced in ((before, stage.rank == 0, "behind"), (behind, stage.is_last, "before")):
        for name in names:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(partial(_check_order, stage, name, misplaced))
            if is_kept:
                kept.add(name)
            else:
                hollow(module, dtype, device)
    mine = frozenset(name for name, _ in model.named_parameters() if name.startswith(tuple(f"{k}." for k in kept)))
    container = cast(nn.ModuleList, model.get_submodule(path))
    for number, block in enumerate(blocks):
        if not first <= number < last:
            for module in block.modules():
                hollow(module, dtype, device)
            container[number] = Absent(block.to(device), _exchange(stage, number, first, last))
    return mine


def end_forward_early(model: nn.Module, stage: Stage) -> None:
    """Have a forward pass in training end behind the model on all stages but the last; call it on a wrapped model."""

    def start(_module: nn.Module, _inputs: object) -> None:
        if stage.in_training and stage.has_run:
            raise StrategyError("strategy 'mesh': with pp a task's loss can call the model once; use pp = 1")
        stage.has_run, stage.past, stage.received, stage.sent = True, False, None, None

    def end(_module: nn.Module, _inputs: object, _output: object) -> None:
        stage.past = None
        if stage.in_training and not stage.is_last:
            raise SentError

    def generate(*_inputs: object, **_named: object) -> None:
        raise StrategyError("strategy 'mesh': with pp greater than 1 a model cannot generate; use pp = 1")

    model.register_forward_pre_hook(start)
    model.register_forward_hook(end)
    if hasattr(model, "generate"):
        vars(model)["generate"] = generate


def _exchange(stage: Stage, number: int, first: int, last: int) -> Any:
    if number == first - 1:
        return stage.take
    return (lambda hidden, _dtype: stage.hand_on(hidden)) if number == last else None


def _check_order(stage: Stage, name: str, misplaced: str, _module: nn.Module, _inputs: object) -> None:
    if stage.past is (misplaced == "behind"):  # not where activations are computed again in a backward pass
        raise StrategyError(
            f"strategy 'mesh': with pp {name} is in the wrong stage: the model calls it {misplaced} the blocks"
        )


def _stack(model: nn.Module, where: str) -> tuple[str, list[nn.Module]]:
    """Return the name of the one list that has the model's blocks, and these."""
    classes = repeated_classes(model)
    found = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module) > 1
        and all(type(block).__name__ in classes for block in module)
    }
    if len(found) != 1:
        listed = ", ".join(found) or "none"
        what = type(model).__name__
        raise StrategyError(f"{where}: needs a model with one list of repeated blocks; {what} has: {listed}")
    return next(iter(found.items()))


def _is_inside(name: str, path: str) -> bool:
    """True for the name of something inside a module; the model's own path is empty."""
    return name.startswith(f"{path}." if path else "")


def _ancestors(path: str) -> Iterator[str]:
    """Yield the names of the modules around a module, the model's own (empty) first."""
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(len(parts)))


def _around(model: nn.Module, path: str) -> tuple[list[str], list[str]]:
    """Return the names of modules with parameters of their own before the blocks, and behind them.

    In the order in which the model registers them; what it calls in another order is noticed as it runs.
    """
    before: list[str] = []
    behind: list[str] = []
    found = before
    for name, module in model.named_modules():
        if name == path:
            found = behind
        elif not _is_inside(name, path) and any(True for _ in module.parameters(recurse=False)):
            found.append(name)
    return before, behind
