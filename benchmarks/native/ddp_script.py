"""A hand-written training script for DistributedDataParallel."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from native.job import Clock, Job, Timing
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def train(job: Job) -> Timing:
    """Train in one rank; return the step times and losses."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(job.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(job.groups(model.module), lr=job.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.rate)
    clock = Clock(job=job, mean=mean)
    model.train()
    for micros in job.steps():
        total = torch.zeros(())
        for number, batch in enumerate(micros):
            with nullcontext() if number == len(micros) - 1 else model.no_sync():
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
