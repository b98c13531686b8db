"""Pipeline parallelism: each rank of a group computes some of a model's blocks, and exchanges hidden states for them.

The forward pass runs the model's own code on every rank, with blocks of other stages absent (see ``cuts``). A rank that
holds several stages, interleaved with those of other ranks, computes one of them in each pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distcore import StrategyError
from distcore_mesh.meshes import link

StandIn = tuple[dict[str, Any], str, nn.Module]
"""A module, and where it stands in a model: in which module's children, under which name."""


class SentError(Exception):
    """Ends a forward pass in training of a stage that is not the last: what follows is computed elsewhere."""


@dataclass(eq=False)
class Stages:
    """The stages of a model that this rank holds, its chunks, and what they exchange with those before and behind.

    Of C chunks on each of P ranks, chunk c of rank r is stage c P + r: hidden states go around the ranks C times.
    """

    rank: int
    """Number of this rank among those that hold one replica."""
    size: int
    """Number of these ranks."""
    activations: tuple[dist.ProcessGroup, ...]
    """These ranks. By the first group a hidden state goes to the next rank, by the second from the last to the first:
    both may be between the same two ranks, and must not wait for each other."""
    gradients: tuple[dist.ProcessGroup, ...]
    """The same for gradients, which go the other way."""
    schedule: str
    """In which order passes run: ``1f1b``, ``gpipe`` or ``interleaved``."""
    chunks: int
    """Stages on each rank."""
    blocks: int = field(default=0, init=False)
    """Blocks of a stage."""
    chunk: int = field(default=0, init=False)
    """The stage that is computed."""
    in_training: bool = field(default=False, init=False)
    """Whether hidden states are kept for a backward pass."""
    has_run: bool = field(default=False, init=False)
    """Whether the model was called for the micro-batch that is computed."""
    past: bool | None = field(default=None, init=False)
    """Whether the forward pass that runs is past its first exchange; ``None``: none runs."""
    received: Tensor | None = field(default=None, init=False)
    """What came from the stage before, in the forward pass that ran last."""
    sent: Tensor | None = field(default=None, init=False)
    """What went to the next stage."""
    _elsewhere: tuple[list[StandIn], ...] = field(init=False)
    """By chunk: what stands in its passes for modules that this rank has for other chunks."""
    _leaving: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque, init=False)
    """What is being sent: a tensor must live until it has arrived."""

    def __post_init__(self) -> None:
        self._elsewhere = tuple([] for _ in range(self.chunks))

    @property
    def number(self) -> int:
        """Number of the stage that is computed."""
        return self.chunk * self.size + self.rank

    @property
    def is_last(self) -> bool:
        """True for the stage that computes the loss."""
        return self.number == self.size * self.chunks - 1

    def chunk_of(self, number: int) -> int | None:
        """Return which of this rank's chunks is the stage of that number; ``None``: another rank has it."""
        chunk, rank = divmod(number, self.size)
        return chunk if rank == self.rank else None

    def only_in(self, chunk: int, place: StandIn) -> None:
        """Have a module stand in its place, instead of one that this rank has, in all chunks' passes but one's."""
        for other in range(self.chunks):
            if other != chunk:
                self._elsewhere[other].append(place)

    @contextmanager
    def computing(self, chunk: int) -> Iterator[None]:
        """Have the model compute one chunk: what this rank has for others is absent."""
        self.chunk, self.past, self.received, self.sent = chunk, False, None, None
        own = [(modules, name, modules[name]) for modules, name, _ in self._elsewhere[chunk]]
        try:
            for modules, name, stand_in in self._elsewhere[chunk]:
                modules[name] = stand_in
            yield
        finally:
            for modules, name, module in own:
                modules[name] = module
            self.past = None

    def behind_absent(self, number: int, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the hidden state behind an absent block, by the block's number, in the dtype that the block gives."""
        first = self.number * self.blocks
        if number == first - 1:
            return self._take(hidden, dtype)
        return self._hand_on(hidden) if number == first + self.blocks else hidden.to(dtype)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of what was received to the rank that sent it."""
        self._send(gradient, self.rank - 1, self.gradients)

    def receive_gradient(self, sent: Tensor) -> Tensor:
        """Return the gradient of what was sent."""
        into = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        return self._receive(into, self.rank + 1, self.gradients)

    def wait(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._leaving:
            self._leaving.popleft()[0].wait()

    def _take(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the hidden state of the stage before, which has the shape of ``like``."""
        self.past = True
        into = torch.empty(like.shape, dtype=dtype, device=like.device)
        self.received = self._receive(into, self.rank - 1, self.activations).requires_grad_(self.in_training)
        return self.received

    def _hand_on(self, hidden: Tensor) -> Tensor:
        """Send the hidden state to the next stage; return zeros of its shape, of which nothing is computed."""
        self.past = True
        self.sent = hidden
        self._send(hidden.detach(), self.rank + 1, self.activations)
        return hidden.new_zeros(()).expand(hidden.shape)

    def _send(self, tensor: Tensor, to: int, groups: tuple[dist.ProcessGroup, ...]) -> None:
        if len(self._leaving) > self.size:  # a stage that runs ahead keeps only so much alive
            self._leaving.popleft()[0].wait()
        tensor = tensor.contiguous()
        to, group = self._link(to, groups)
        work = dist.isend(tensor, group=group, group_dst=to)
        assert work is not None  # this rank is in the group
        self._leaving.append((work, tensor))

    def _receive(self, into: Tensor, source: int, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        source, group = self._link(source, groups)
        work = dist.irecv(into, group=group, group_src=source)
        assert work is not None
        work.wait()
        return into

    def _link(self, rank: int, groups: tuple[dist.ProcessGroup, ...]) -> tuple[int, dist.ProcessGroup]:
        """Return the rank before or behind this one, around the end, and the group that connects both."""
        return (rank, groups[0]) if 0 <= rank < self.size else (rank % self.size, groups[1])


def stages_of(mesh: DeviceMesh, schedule: str, chunks: int) -> Stages:
    """Return this rank's stages in a mesh whose first dimension, ``pp``, has their ranks; every rank calls."""
    own = mesh["pp"]
    links = 1 if chunks == 1 else 2
    more = [link(mesh, number) for number in range(2 * links - 1)]
    activations, gradients = (own.get_group(), *more[links:]), tuple(more[:links])
    return Stages(own.get_local_rank(), own.size(), activations, gradients, schedule, chunks)


def run_stages(model: nn.Module, stages: Stages) -> None:
    """Have a call of the model compute this rank's stages; call it on a wrapped model.

    In training it computes one, and ends behind the model unless that is the last; else all, one after another.
    """
    forward = model.forward

    @wraps(forward)
    def in_stages(*inputs: Any, **named: Any) -> Any:
        if stages.in_training and stages.has_run:
            raise StrategyError("strategy 'mesh': with pp a task's loss can call the model once; use pp = 1")
        stages.has_run, output = True, None
        for chunk in (stages.chunk,) if stages.in_training else range(stages.chunks):
            with stages.computing(chunk):
                output = forward(*inputs, **named)
        return output

    def end(_module: nn.Module, _inputs: object, _output: object) -> None:
        if stages.in_training and not stages.is_last:
            raise SentError

    def generate(*_inputs: object, **_named: object) -> None:
        raise StrategyError("strategy 'mesh': with pp greater than 1 a model cannot generate; use pp = 1")

    vars(model)["forward"] = in_stages
    model.register_forward_hook(end)  # behind those of FSDP2, whose passes must end in order
    if hasattr(model, "generate"):
        vars(model)["generate"] = generate
