"""A hand-written training script for Hugging Face Accelerate with DDP."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from native.job import Clock, Job, Timing
from torch import Tensor
from torch.nn.functional import cross_entropy


def train(job: Job) -> Timing:
    """Train in one rank; return the step times and losses."""
    bucket_view = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=job.config.global_batch_size
        // (int(job.config.micro_batch_size) * job.size),
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[bucket_view],
    )
    model = job.model()
    optimizer = torch.optim.AdamW(job.groups(model), lr=job.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.rate)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def mean(value: Tensor) -> Tensor:
        reduced: Tensor = accelerator.reduce(value, reduction="mean")
        return reduced

    clock = Clock(job=job, mean=mean)
    model.train()
    for micros in job.steps():
        total = torch.zeros(())
        for batch in micros:
            with accelerator.accumulate(model):
                logits = model(
                    input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
                ).logits
                loss = cross_entropy(logits, batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / len(micros)
        scheduler.step()
        clock.tick(total)
    accelerator.wait_for_everyone()
    return clock.timing()
