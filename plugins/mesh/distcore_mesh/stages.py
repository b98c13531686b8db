"""Pipeline parallelism: each rank computes some of a model's blocks, and exchanges hidden states.

The forward pass runs the model's own code on every rank, with placeholders for other stages' blocks
(see ``pipeline_split``). A rank with several stages, interleaved with those of other ranks,
computes one in each pass.
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
from distcore_mesh.block_calls import BlockCalls
from distcore_mesh.layer_outputs import check_asked, without_other_layers
from distcore_mesh.process_groups import pipeline_group

StandIn = tuple[dict[str, Any], str, nn.Module]
"""The children of a module, the name of one of them, and a module to replace it."""


class SentError(Exception):
    """Ends a forward pass of training on every stage but the last: other ranks compute the rest."""


@dataclass(eq=False)
class Stages:
    """This rank's stages of a model, its chunks, and their exchange with neighboring stages.

    With C chunks on each of P ranks, chunk c of rank r is stage c P + r: hidden states go around
    the ranks C times.
    """

    rank: int
    """Number of this rank among the ranks of one replica."""
    size: int
    """Number of ranks of a replica."""
    activations: tuple[dist.ProcessGroup, ...]
    """Groups of these ranks for hidden states.

    They go to the next rank by the first group, and from the last rank to the first by the second,
    which exists if ranks have several stages. With two ranks, messages of both kinds go from one to
    the other, and must not wait in one queue.
    """
    gradients: tuple[dist.ProcessGroup, ...]
    """The same for gradients, which go the other way."""
    schedule: str
    """Order of the passes: ``1f1b``, ``gpipe`` or ``interleaved``."""
    chunks: int
    """Stages on each rank."""
    blocks: int = field(default=0, init=False)
    """Blocks of a stage."""
    calls: BlockCalls = field(init=False)
    """The calls of all blocks."""
    chunk: int = field(default=0, init=False)
    """The chunk that is being computed."""
    in_training: bool = field(default=False, init=False)
    """True if hidden states are kept for a backward pass."""
    has_run: bool = field(default=False, init=False)
    """True if the model was already called for the present micro-batch."""
    has_exchanged: bool | None = field(default=None, init=False)
    """True after the first exchange of the running forward pass; ``None``: no forward pass runs."""
    received: Tensor | None = field(default=None, init=False)
    """The hidden state of the stage before, from the latest forward pass."""
    sent: Tensor | None = field(default=None, init=False)
    """The hidden state for the next stage, from the latest forward pass."""
    _stand_ins: tuple[list[StandIn], ...] = field(init=False)
    """For each chunk: placeholders for the modules of this rank's other chunks."""
    _in_flight: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque, init=False)
    """Messages on their way: a tensor must live until it has arrived."""

    def __post_init__(self) -> None:
        self._stand_ins = tuple([] for _ in range(self.chunks))

    def share_blocks(self, blocks: int) -> None:
        """Set the number of the model's blocks, of which each stage has as many."""
        self.blocks = blocks // (self.size * self.chunks)
        self.calls = BlockCalls(self, blocks)

    @property
    def number(self) -> int:
        """Number of the stage that is being computed."""
        return self.chunk * self.size + self.rank

    @property
    def is_last(self) -> bool:
        """True for the stage that computes the loss."""
        return self.number == self.size * self.chunks - 1

    def chunk_of(self, number: int) -> int | None:
        """Return the chunk of this rank that is stage ``number``; ``None``: another rank has it."""
        chunk, rank = divmod(number, self.size)
        return chunk if rank == self.rank else None

    def replace_outside(self, chunk: int, stand_in: StandIn) -> None:
        """Replace one of this rank's modules in the passes of all chunks but ``chunk``."""
        for other in range(self.chunks):
            if other != chunk:
                self._stand_ins[other].append(stand_in)

    @contextmanager
    def computing(self, chunk: int) -> Iterator[None]:
        """Have the model compute one chunk, with placeholders for this rank's other chunks."""
        self.chunk = chunk
        self.has_exchanged = False
        self.received = None
        self.sent = None
        stand_ins = self._stand_ins[chunk]
        originals = [(modules, name, modules[name]) for modules, name, _ in stand_ins]
        try:
            for modules, name, stand_in in stand_ins:
                modules[name] = stand_in
            self.calls.begin()
            yield
            self.calls.finish()
        finally:
            self.calls.stop()
            for modules, name, module in originals:
                modules[name] = module
            self.has_exchanged = None

    def pass_placeholder(self, number: int, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the output of the placeholder for block ``number``, in the dtype of its output.

        Receives the hidden state before the first block of the stage, and sends it after the last.
        """
        first = self.number * self.blocks
        if number == first - 1:
            return self._receive_hidden(hidden, dtype)
        if number == first + self.blocks:
            return self._send_hidden(hidden)
        return hidden.to(dtype)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of a received hidden state to the rank before."""
        self._send(gradient, self.rank - 1, self.gradients)

    def receive_gradient(self, sent: Tensor) -> Tensor:
        """Receive the gradient of a sent hidden state."""
        into = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        return self._receive(into, self.rank + 1, self.gradients)

    def wait(self) -> None:
        """Wait until all messages have arrived."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()

    def _receive_hidden(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Receive the hidden state of the stage before, which has the shape of ``like``."""
        self.has_exchanged = True
        into = torch.empty(like.shape, dtype=dtype, device=like.device)
        hidden = self._receive(into, self.rank - 1, self.activations)
        self.received = hidden.requires_grad_(self.in_training)
        return self.received

    def _send_hidden(self, hidden: Tensor) -> Tensor:
        """Send the hidden state to the next stage. Return zeros of its shape, without memory."""
        self.has_exchanged = True
        self.sent = hidden
        self._send(hidden.detach(), self.rank + 1, self.activations)
        return hidden.new_zeros(()).expand(hidden.shape)

    def _send(self, tensor: Tensor, target: int, groups: tuple[dist.ProcessGroup, ...]) -> None:
        """Start to send a tensor to the rank before or after this one."""
        # Bounds the memory of a stage that runs ahead.
        if len(self._in_flight) > self.size:
            oldest, _ = self._in_flight.popleft()
            oldest.wait()
        tensor = tensor.contiguous()
        peer, group = self._peer(target, groups)
        work = dist.isend(tensor, group=group, group_dst=peer)
        assert work is not None  # this rank is in the group
        self._in_flight.append((work, tensor))

    def _receive(self, into: Tensor, source: int, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        """Receive a tensor from the rank before or after this one; return ``into``."""
        peer, group = self._peer(source, groups)
        work = dist.irecv(into, group=group, group_src=peer)
        assert work is not None
        work.wait()
        return into

    def _peer(
        self, rank: int, groups: tuple[dist.ProcessGroup, ...]
    ) -> tuple[int, dist.ProcessGroup]:
        """Return the rank before or after this one, and the group that connects both.

        The rank after the last one is the first, which a second group connects.
        """
        if 0 <= rank < self.size:
            return rank, groups[0]
        return rank % self.size, groups[1]


def make_stages(mesh: DeviceMesh, schedule: str, chunks: int) -> Stages:
    """Make this rank's stages in a mesh whose first dimension is ``pp``. Every rank must call."""
    dimension = mesh["pp"]
    # Several stages on each rank: the last rank also sends to the first, by a second group.
    links = 1 if chunks == 1 else 2
    # The first group of activations is that of the mesh.
    others = [pipeline_group(mesh, number) for number in range(2 * links - 1)]
    gradients = tuple(others[:links])
    activations = (dimension.get_group(), *others[links:])
    rank, size = dimension.get_local_rank(), dimension.size()
    return Stages(rank, size, activations, gradients, schedule, chunks)


def install_stages(model: nn.Module, stages: Stages) -> None:
    """Replace the forward of a wrapped model: a call then computes this rank's stages.

    In training a call computes one stage, and raises SentError after the model unless the stage is
    the last. In evaluation it computes all stages, one after another.
    """
    forward = model.forward

    @wraps(forward)
    def in_stages(*inputs: Any, **named: Any) -> Any:
        if stages.in_training and stages.has_run:
            raise StrategyError(
                "strategy 'mesh': with pp a task's loss can call the model once; use pp = 1"
            )
        stages.has_run = True
        check_asked(model, named)
        output = None
        chunks = (stages.chunk,) if stages.in_training else range(stages.chunks)
        for chunk in chunks:
            with stages.computing(chunk):
                output = forward(*inputs, **named)
        return without_other_layers(output)

    def end(_module: nn.Module, _inputs: object, _output: object) -> None:
        if stages.in_training and not stages.is_last:
            raise SentError

    def generate(*_inputs: object, **_named: object) -> None:
        raise StrategyError(
            "strategy 'mesh': with pp greater than 1 a model cannot generate; use pp = 1"
        )

    vars(model)["forward"] = in_stages
    model.register_forward_hook(end)  # after FSDP2's own hooks, which must run in every pass
    if hasattr(model, "generate"):
        vars(model)["generate"] = generate
