"""In which order a stage runs the forward and backward passes of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from distcore import Batch, MicroBatch, Run, StepLoss, StrategyError, hookimpl
from distcore_mesh.stages import SentError, Stage


def order(schedule: str, micros: int, stage: int, stages: int) -> Iterator[str]:
    """Yield ``forward`` and ``backward``, each as often as there are micro-batches; each takes the next one.

    ``gpipe``: all forward passes, then all backward passes. ``1f1b``: a stage runs ahead of the next one by one
    micro-batch, then does one forward and one backward pass in turns, so that it keeps the activations of at most
    ``stages - stage`` micro-batches (PipeDream-Flush: Narayanan et al., 2021, arXiv:2006.09503).
    """
    ahead = micros if schedule == "gpipe" else min(micros, stages - stage)
    yield from ["forward"] * ahead
    for _ in range(micros - ahead):
        yield "backward"
        yield "forward"
    yield from ["backward"] * ahead


@hookimpl
def train_step(run: Run, micros: list[tuple[MicroBatch, Batch]], loss: StepLoss) -> Tensor:
    """Run one step's passes through this rank's stage; return the sum of the losses, 0 but on the last stage."""
    stage: Stage = vars(run.module)["distcore_stage"]
    # Blocks of another stage draw other dropout masks: all ranks of the data shard were seeded alike.
    if stage.rank:
        torch.manual_seed(torch.initial_seed() ^ stage.rank)
    coming, running = iter(micros), deque[tuple[bool, Tensor | None, Tensor]]()
    total = torch.zeros((), device=run.world.device)
    stage.in_training = True
    try:
        for each in order(stage.schedule, len(micros), stage.rank, stage.size):
            if each == "forward":
                micro, batch = next(coming)
                result = _forward(run, stage, micro, batch, loss)
                running.append((micro.last, stage.received, result))
                total = total + result.detach() if stage.is_last else total
            else:
                _backward(run, stage, *running.popleft())
        stage.wait()
    finally:
        stage.in_training = False
    return total


def _forward(run: Run, stage: Stage, micro: MicroBatch, batch: Batch, loss: StepLoss) -> Tensor:
    """Return the loss of a micro-batch or, but on the last stage, the hidden state that was sent."""
    stage.has_run = False
    try:
        result = loss(run.model, micro, batch)
    except SentError:
        assert stage.sent is not None  # only a stage that sent ends so
        return stage.sent
    if not stage.is_last:
        raise StrategyError("strategy 'mesh': with pp a task's loss must call model(...); use pp = 1")
    return result


def _backward(run: Run, stage: Stage, last: bool, received: Tensor | None, result: Tensor) -> None:
    if isinstance(run.model, FSDPModule):
        run.model.set_requires_gradient_sync(last)
    gradient = None if stage.is_last else stage.receive_gradient(result)
    if result.requires_grad:  # else all that this stage has is frozen
        torch.autograd.backward(result, gradient)
    if received is not None:
        assert received.grad is not None  # it is a leaf of the pass
        stage.send_gradient(received.grad)
