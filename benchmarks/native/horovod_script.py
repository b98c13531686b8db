"""A hand-written training script for Horovod: wrap the optimizer, broadcast
once, synchronize before clipping.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from native.job import Clock, Job, Timing
from torch.nn.functional import cross_entropy

from distcore import RankInfo
from distcore_horovod.rendezvous import connect


def train(job: Job) -> Timing:
    """Train in one rank; return the step times and losses."""
    init(job)
    model = job.model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(job.groups(model), lr=job.lr, fused=True),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=job.config.global_batch_size
        // (int(job.config.micro_batch_size) * job.size),
        groups=1,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.rate)
    clock = Clock(job=job, mean=hvd.allreduce)
    model.train()
    for micros in job.steps():
        total = torch.zeros(())
        for batch in micros:
            logits = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
            loss = cross_entropy(logits, batch["labels"]) / len(micros)
            loss.backward()
            total += loss.detach()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.tick(total)
    hvd.barrier()
    hvd.shutdown()
    return clock.timing()


def init(job: Job) -> None:
    """Connect the ranks. distcore has started them, so nobody else does
    what ``horovodrun`` would do.
    """
    connect(
        RankInfo(rank=job.rank, size=job.size, local_rank=job.rank, local_size=job.size), timeout=60
    )
