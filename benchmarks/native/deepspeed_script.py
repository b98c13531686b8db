"""A hand-written training script for DeepSpeed: a config, ``initialize``, and
``step`` after every micro-batch.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from native.job import Clock, Job, Timing
from torch import Tensor
from torch.nn.functional import cross_entropy


def train(job: Job) -> Timing:
    """Train in one rank; return the step times and losses."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled on first use
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    deepspeed.init_distributed("gloo")
    model = job.model()
    optimizer = torch.optim.AdamW(job.groups(model), lr=job.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, job.rate)
    config = config_of(job, model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    clock = Clock(job=job, mean=mean)
    engine.train()
    for micros in job.steps():
        total = torch.zeros(())
        for batch in micros:
            logits = engine(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
            loss = cross_entropy(logits, batch["labels"])
            total += engine.backward(loss).detach()
            engine.step()
        clock.tick(total)
    dist.barrier()
    return clock.timing()


def config_of(job: Job, model: Any) -> dict[str, Any]:
    """Return DeepSpeed's config for the job."""
    zero = {"stage": job.config.strategy_options["stage"]}
    if zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 10 * model.config.hidden_size
    return {
        "train_batch_size": job.config.global_batch_size,
        "train_micro_batch_size_per_gpu": job.config.micro_batch_size,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }


def mean(value: Tensor) -> Tensor:
    """Average a value over ranks."""
    dist.all_reduce(value)
    return value / dist.get_world_size()
