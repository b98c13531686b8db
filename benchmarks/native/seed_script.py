"""The seed's job as the published scripts do it: tokenize when collating, pad every row to 128,
fp32, one Python loop.

    python benchmarks/native/seed_script.py MODEL_FOLDER TRAIN.json OUT --seed 0
    alone, or under torchrun

It does not use distcore. It writes to OUT the trained model, and timing.json: samples, seconds, and
milliseconds of each step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MAX_LENGTH, BATCH, LOG_EVERY = 128, 32, 10


def main() -> None:
    """Train, save the model and the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("train")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float, default=3e-5)
    arguments = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model: Any = AutoModelForSequenceClassification.from_pretrained(arguments.model).to(device)
    optimizer = torch.optim.AdamW(groups(model), lr=arguments.lr)
    wrapped = DistributedDataParallel(model) if size > 1 else model
    rows = json.loads(Path(arguments.train).read_text(encoding="utf-8"))

    def collate(batch: list[tuple[str, int]]) -> dict[str, Any]:
        texts = [text for text, _ in batch]
        tokens = tokenizer(
            texts, padding="max_length", truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
        )
        return {**tokens, "labels": torch.tensor([label for _, label in batch])}

    sampler = DistributedSampler[tuple[str, int]](
        rows, num_replicas=size, rank=rank, seed=arguments.seed
    )
    loader = DataLoader(rows, batch_size=BATCH, sampler=sampler, collate_fn=collate)
    samples, times = train(wrapped, optimizer, loader, device, arguments.steps)
    if rank == 0:
        model.save_pretrained(arguments.out)
        tokenizer.save_pretrained(arguments.out)
        milliseconds = [1e3 * (end - start) for start, end in pairwise(times)]
        timing = {
            "samples": samples * size,
            "seconds": times[-1] - times[0],
            "step_ms": milliseconds,
        }
        (arguments.out / "timing.json").write_text(json.dumps(timing), encoding="utf-8")
    if size > 1:
        dist.destroy_process_group()


def groups(model: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of AdamW: no weight decay on biases and normalization weights."""
    plain = ("bias", "LayerNorm.weight")
    return [
        {
            "params": [p for n, p in model.named_parameters() if not n.endswith(plain)],
            "weight_decay": 0.01,
        },
        {
            "params": [p for n, p in model.named_parameters() if n.endswith(plain)],
            "weight_decay": 0.0,
        },
    ]


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    device: torch.device,
    steps: int | None,
) -> tuple[int, list[float]]:
    """Train one epoch, or its first ``steps``. Return this rank's samples, and the times of
    start and step ends.
    """
    model.train()
    samples, times = 0, [time.perf_counter()]
    autocast = (
        torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()
    )
    for number, batch in enumerate(loader):
        if number == steps:
            break
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        with autocast:
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % LOG_EVERY == 0:
            shown = loss.detach()
            if dist.is_initialized():
                dist.all_reduce(shown)
            print(f"step {number} loss {shown.item():.4f}", flush=True)
        samples += len(batch["labels"])
        times.append(time.perf_counter())
    if device.type == "cuda":  # the last steps may still be running
        torch.cuda.synchronize()
        times[-1] = time.perf_counter()
    return samples, times


if __name__ == "__main__":
    main()
