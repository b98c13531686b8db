"""A hand-written training script for FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
from native.job import Clock, Job, Timing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers.models.bert.modeling_bert import BertEmbeddings, BertLayer


def train(job: Job) -> Timing:
    """Train in one rank; return the step times and losses."""
    dist.init_process_group("gloo")
    model = job.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, BertLayer | BertEmbeddings):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(job.groups(model), lr=job.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.rate)
    clock = Clock(job=job, mean=mean)
    model.train()
    for micros in job.steps():
        total = torch.zeros(())
        for number, batch in enumerate(micros):
            model.set_requires_gradient_sync(number == len(micros) - 1)
            logits = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
            loss = cross_entropy(logits, batch["labels"]) / len(micros)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.tick(total)
    dist.barrier()
    return clock.timing()


def mean(value: Tensor) -> Tensor:
    """Average a value over ranks."""
    dist.all_reduce(value)
    return value / dist.get_world_size()
