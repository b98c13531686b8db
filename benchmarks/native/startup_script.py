"""A plain script up to its first step, for benchmarks/startup.py: it does not use distcore.

    python benchmarks/native/startup_script.py MODEL_FOLDER ROWS.json FILE alone, or under torchrun

It tokenizes all rows, as distcore does when nothing is cached. The main rank writes the time of the
end of the first step to FILE, as JSON, in seconds since 1970.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

BATCH = 32


def main() -> None:
    """Train one step, and write when it was done."""
    folder, rows, file = sys.argv[1:]
    is_distributed = "RANK" in os.environ
    if is_distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).train()
    texts, labels = zip(*json.loads(Path(rows).read_text(encoding="utf-8")), strict=True)
    ids = tokenizer(list(texts), truncation=True, max_length=128)["input_ids"]
    data: Any = [
        {"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, fused=True)
    sampler: Any = DistributedSampler(data) if is_distributed else None
    collate = DataCollatorWithPadding(tokenizer)
    loader = DataLoader(
        data, batch_size=BATCH, shuffle=sampler is None, sampler=sampler, collate_fn=collate
    )
    wrapped = DistributedDataParallel(model) if is_distributed else model
    wrapped(**next(iter(loader))).loss.backward()
    optimizer.step()
    if not is_distributed or dist.get_rank() == 0:
        done = Path(f"{file}.part")
        done.write_text(json.dumps({"time": time.time(), "marks": []}), encoding="utf-8")
        done.rename(file)
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
