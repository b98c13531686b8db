"""The forward and backward passes of a step through the stages of a rank."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from distcore import Batch, MicroBatch, Run, StepLoss, StrategyError, hookimpl
from distcore_mesh.pipeline_schedules import pass_order
from distcore_mesh.stages import SentError, Stages
from distcore_mesh.state import MeshState

CHANGED = re.compile(r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\]")
"""torch's message for a tensor that is needed by a backward pass and has changed; its shape."""


@hookimpl
def train_step(run: Run, micros: list[tuple[MicroBatch, Batch]], loss: StepLoss) -> Tensor:
    """Run one step's passes through this rank's stages.

    Returns the sum of the losses, which is 0 on all ranks but the last.
    """
    state: MeshState = run.strategy_state
    stages = state.stages
    assert stages is not None  # the strategy has this hook with pp > 1 only
    # All ranks of a data shard have one seed, but the blocks of different stages must draw
    # different dropout masks.
    if stages.rank:
        torch.manual_seed(torch.initial_seed() ^ stages.rank)
    upcoming = [iter(micros) for _ in range(stages.chunks)]
    running = [deque[tuple[Tensor | None, Tensor]]() for _ in upcoming]
    left = 2 * len(micros) * stages.chunks
    total = torch.zeros((), device=run.world.device)
    stages.in_training = True
    try:
        passes = pass_order(stages.schedule, len(micros), stages.rank, stages.size, stages.chunks)
        for kind, chunk in passes:
            left -= 1
            stages.chunk = chunk
            if kind == "forward":
                micro, batch = next(upcoming[chunk])
                result = _forward(run, stages, micro, batch, loss)
                running[chunk].append((stages.received, result))
                if stages.is_last:
                    total = total + result.detach()
            else:
                # Without names here, which would keep both until the next backward pass.
                _backward(run, stages, left == 0, *running[chunk].popleft())
        stages.wait()
    finally:
        stages.in_training = False
        # Break a cycle that would keep them for ever: their graphs hold FSDP2's hooks, the model
        # and these stages.
        stages.received = stages.sent = None
    return total


def _forward(
    run: Run,
    stages: Stages,
    micro: MicroBatch,
    batch: Batch,
    loss: StepLoss,
) -> Tensor:
    """Return the loss of a micro-batch on the last stage; on others, the sent hidden state."""
    stages.has_run = False
    try:
        result = loss(run.model, micro, batch)
    except SentError:
        assert stages.sent is not None  # SentError follows a send
        return stages.sent
    if not stages.is_last:
        raise StrategyError(
            "strategy 'mesh': with pp a task's loss must call model(...); use pp = 1"
        )
    return result


def _backward(
    run: Run, stages: Stages, last: bool, received: Tensor | None, result: Tensor
) -> None:
    """Run the backward pass of a micro-batch; ``result`` is what ``_forward`` returned.

    ``received`` is the hidden state of the stage before; ``None`` in the first stage.
    """
    state: MeshState = run.strategy_state
    if state.sync is not None:
        state.sync.tell(last)
    gradient = None if stages.is_last else stages.receive_gradient(result)
    # Without a gradient, the whole stage is frozen.
    if result.requires_grad:
        with explain_changed_tensors(run.module):
            torch.autograd.backward(result, gradient)
    if received is not None:
        assert received.grad is not None  # it is a leaf of the graph
        stages.send_gradient(received.grad)


@contextmanager
def explain_changed_tensors(module: nn.Module) -> Iterator[None]:
    """Turn torch's error about a tensor that changed before its backward pass into one line.

    A module that writes its weights in forward, such as one that clamps them, trains where each
    backward pass follows its forward pass. In a pipeline other forward passes come in between.
    """
    try:
        yield
    except RuntimeError as error:
        changed = CHANGED.search(str(error))
        if changed is None:
            raise
        named = _name_of(changed[1], module)
        raise StrategyError(
            f"strategy 'mesh': forward writes in place to {named}, which the backward pass of "
            "another micro-batch still needs: with pp several forward passes come before it; "
            "write to no weight in forward, or use pp = 1"
        ) from error


def _name_of(shape: str, module: nn.Module) -> str:
    """Return what torch may mean by a shape such as ``16, 32``: a weight of it, or transposed."""
    sizes = sorted(int(size) for size in shape.split(",") if size.strip())
    weights = module.named_parameters()
    name = next((name for name, weight in weights if sorted(weight.shape) == sizes), None)
    like = f", such as the weight {name!r}" if name else ""
    return f"a tensor of shape [{shape}]{like}"
