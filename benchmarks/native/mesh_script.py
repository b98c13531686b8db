"""Hand-written training scripts for layouts: torch's tensor parallelism, alone and under
FSDP2, and its pipelines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from native.job import Clock, Job, Timing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, pad
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer

COLWISE = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "intermediate.dense",
)
ROWWISE = ("attention.output.dense", "output.dense")


def train(job: Job) -> Timing:
    """Train in one rank, by the layout of the config; return the step times and losses."""
    dist.init_process_group("gloo")
    if "pp" in job.config.strategy_options:
        return in_stages(job)
    tp = job.config.strategy_options["tp"]
    mesh = init_device_mesh("cpu", (job.size // tp, tp), mesh_dim_names=("shard", "tp"))
    return by_layers(replace(job, rank=job.rank // tp, size=job.size // tp), mesh)


def by_layers(job: Job, mesh: DeviceMesh) -> Timing:
    """Split layers over ranks, and shard what each has over the others, if there are any."""
    model = job.model()
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLWISE} | {
        name: RowwiseParallel() for name in ROWWISE
    }
    for layer in (module for module in model.modules() if isinstance(module, BertLayer)):
        parallelize_module(layer, mesh["tp"], styles)
    split = {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    if job.size > 1:
        parts = [
            module for module in model.modules() if isinstance(module, BertLayer | BertEmbeddings)
        ]
        for module in (*parts, model):  # the whole last: it takes what is left
            fully_shard(module, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(one_kind_each(job.groups(model)), lr=job.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.rate)
    clock = Clock(job=job, mean=mean)
    model.train()
    for micros in job.steps():
        total = torch.zeros(())
        for number, batch in enumerate(micros):
            if job.size > 1:
                model.set_requires_gradient_sync(number == len(micros) - 1)
            logits = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
            loss = cross_entropy(logits, batch["labels"]) / len(micros)
            loss.backward()
            total += loss.detach()
        clip(model, lambda squares: joined(squares, mesh), split)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.tick(total)
    dist.barrier()
    return clock.timing()


def one_kind_each(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split groups by the mesh of their parameters: fused kernels refuse plain tensors beside
    those of a mesh.
    """
    split = []
    for group in groups:
        kinds: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            kinds.setdefault(
                parameter.device_mesh if isinstance(parameter, DTensor) else None, []
            ).append(parameter)
        split += [group | {"params": parameters} for parameters in kinds.values()]
    return split


def clip(model: nn.Module, join: Callable[[Tensor], Tensor], split: set[str]) -> None:
    """Clip by the norm of the whole gradient; torch's own function refuses several meshes.

    ``join`` sums two squares over ranks: of what is in ``split``, and of all else.
    """
    local = {
        name: p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    sums = [
        [gradient for name, gradient in local.items() if (name in split) is is_split]
        for is_split in (True, False)
    ]
    norms = [
        torch._foreach_norm(gradients) if gradients else [torch.zeros(())] for gradients in sums
    ]
    squares = torch.stack([torch.stack([*each]).square().sum() for each in norms])
    norm = join(squares).sqrt()
    torch._foreach_mul_([*local.values()], (1.0 / (norm + 1e-6)).clamp(max=1.0))


def joined(squares: Tensor, mesh: DeviceMesh) -> Tensor:
    """The square of the whole norm, from a rank's two."""
    dist.all_reduce(squares[:1], group=mesh["tp"].get_group())
    total = squares.sum()
    if mesh["shard"].size() > 1:
        dist.all_reduce(total, group=mesh["shard"].get_group())
    return total


class Part(nn.Module):
    """One stage of the classifier: its layers, and what stands before the first
    or behind the last.
    """

    def __init__(self, model: Any, rank: int, stages: int) -> None:
        super().__init__()
        layers = model.bert.encoder.layer
        own = len(layers) // stages
        self.embeddings = model.bert.embeddings if rank == 0 else None
        self.layer = nn.ModuleList(layers[rank * own : (rank + 1) * own])
        is_last = rank == stages - 1
        self.pooler: Any = model.bert.pooler if is_last else None
        self.classifier: Any = model.classifier if is_last else None

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """From tokens or a hidden state to a hidden state or logits."""
        if self.embeddings is not None:
            hidden = self.embeddings(hidden)
        mask = attention_mask[:, None, None, :].bool().expand(-1, 1, hidden.shape[1], -1)
        for layer in self.layer:
            answer = layer(hidden, attention_mask=mask)
            hidden = answer[0] if isinstance(answer, tuple) else answer
        return hidden if self.pooler is None else self.classifier(self.pooler(hidden))


def in_stages(job: Job) -> Timing:
    """Train one stage of a pipeline."""
    model = Part(job.model(), job.rank, job.size)
    optimizer = torch.optim.AdamW(job.groups(model), lr=job.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.rate)
    clock = Clock(job=job, mean=lambda value: mean(value) * job.size)
    stage: Any = PipelineStage(model, job.rank, job.size, torch.device("cpu"))
    model.train()
    for micros in replace(job, rank=0, size=1).steps():
        # a schedule needs one shape for all
        length = max(batch["input_ids"].shape[1] for batch in micros)
        tokens, mask = (
            torch.cat([pad(batch[name], (0, length - batch[name].shape[1])) for batch in micros])
            for name in ("input_ids", "attention_mask")
        )
        # the next step has another length
        stage._stage_forward_initialized = stage._stage_backward_initialized = False
        schedule = Schedule1F1B(stage, len(micros), loss_fn=cross_entropy, scale_grads=True)
        losses: list[Tensor] = []
        inputs = (tokens,) if job.rank == 0 else ()
        target = (
            torch.cat([batch["labels"] for batch in micros]) if job.rank == job.size - 1 else None
        )
        schedule.step(*inputs, target=target, losses=losses, attention_mask=mask)
        clip(model, summed, set())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.tick(torch.stack(losses).mean().detach() if losses else torch.zeros(()))
    dist.barrier()
    return clock.timing()


def summed(squares: Tensor) -> Tensor:
    """The square of the whole norm, of which each stage has its part."""
    total = squares.sum()
    dist.all_reduce(total)
    return total


def mean(value: Tensor) -> Tensor:
    """Average a value over ranks."""
    dist.all_reduce(value)
    return value / dist.get_world_size()
