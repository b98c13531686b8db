"""One run of the job of benchmarks/peers.py under one library; each rank prints its seconds per 1,000 rows as JSON.

    python benchmarks/native/peer_job.py KIND MODEL_FOLDER ROWS.json STEPS fp32|bf16        alone, or under torchrun

Only steps behind the first ``WARM`` count. Every kind trains on the same rows, 32 per step and rank, shuffled, with
AdamW at a constant 3e-5, in fp32 or under each library's mixed precision. Rows are tokenized before the first step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch

from distcore import hookimpl

WARM, BATCH, RATE = 3, 32, 3e-5
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Clock:
    """Counts steps, and the time from the end of step ``WARM`` on."""

    def __init__(self, steps: int, half: bool) -> None:
        self.steps, self.half, self.done = steps, half, 0
        self.began = (0.0, 0.0)
        self.spent = (0.0, 0.0)

    def tick(self) -> None:
        """Call it at the end of each step."""
        self.done += 1
        now = (time.process_time(), time.perf_counter())
        if self.done == WARM:
            self.began = now
        self.spent = (now[0] - self.began[0], now[1] - self.began[1])

    def result(self) -> dict[str, float]:
        """Return seconds per 1,000 rows of all ranks; CPU seconds are those of this rank."""
        thousands = (self.done - WARM) * BATCH * WORLD / 1000
        return {"cpu": self.spent[0] / thousands, "wall": self.spent[1] / thousands}


class Ticks:
    """An extension of distcore that tells the program's clock when a step is done."""

    @hookimpl
    def on_step_end(self) -> None:
        sys.modules["__main__"].CLOCK.tick()


def parts(folder: str, rows: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Return the tokenizer, the model in training mode, and tokenized rows."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    with open(rows, encoding="utf-8") as file:
        texts, labels = zip(*json.load(file), strict=True)
    ids = tokenizer(list(texts), truncation=True, max_length=128)["input_ids"]
    data = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    return tokenizer, model.train(), data


def loader(tokenizer: Any, data: Any, sampler: Any = None) -> Any:
    """Return shuffled batches, each padded to its longest row."""
    from transformers import DataCollatorWithPadding

    return torch.utils.data.DataLoader(
        data,
        batch_size=BATCH,
        shuffle=sampler is None,
        sampler=sampler,
        drop_last=True,
        collate_fn=DataCollatorWithPadding(tokenizer),
    )


def optimizer_of(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)


def by_hand(folder: str, rows: str, clock: Clock) -> None:
    """A loop as in the tutorials."""
    tokenizer, model, data = parts(folder, rows)
    optimizer, sampler = optimizer_of(model), cast("Any", None)
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")
        sampler = torch.utils.data.DistributedSampler(data)  # type: ignore[arg-type]
        model = torch.nn.parallel.DistributedDataParallel(model)
    for _, batch in zip(range(clock.steps), loader(tokenizer, data, sampler), strict=False):
        with torch.autocast("cpu", torch.bfloat16) if clock.half else nullcontext():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def accelerated(folder: str, rows: str, clock: Clock) -> None:
    """Accelerate as its page has it, with its defaults."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if clock.half else "no")
    tokenizer, model, data = parts(folder, rows)
    prepared: Any = accelerator.prepare(model, optimizer_of(model), loader(tokenizer, data))
    model, optimizer, batches = prepared
    for _, batch in zip(range(clock.steps), batches, strict=False):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def trainer(folder: str, rows: str, clock: Clock, sampling: str = "random") -> None:
    """The HF Trainer; ``sampling`` is its ``train_sampling_strategy``."""
    from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            clock.tick()

    tokenizer, model, data = parts(folder, rows)
    settings: Any = {
        "per_device_train_batch_size": BATCH, "learning_rate": RATE, "lr_scheduler_type": "constant",
        "weight_decay": 0.01, "max_steps": clock.steps, "max_grad_norm": 0.0, "report_to": [], "save_strategy": "no",
        "logging_steps": 10, "disable_tqdm": True, "use_cpu": True, "train_sampling_strategy": sampling,
        "bf16": clock.half,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        Trainer(
            model=model,
            args=TrainingArguments(output_dir=out, **settings),
            train_dataset=data,
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[Ticks()],
        ).train()


def grouped(folder: str, rows: str, clock: Clock) -> None:
    """The HF Trainer, rows of like length in a batch: its best documented setting."""
    trainer(folder, rows, clock, "group_by_length")


def lightning(folder: str, rows: str, clock: Clock) -> None:
    """Lightning, with its defaults but for what it writes."""
    import lightning as library

    tokenizer, model, data = parts(folder, rows)

    class Job(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.model)

        def on_train_batch_end(self, *given: Any) -> None:
            clock.tick()

    settings: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings |= {"precision": "bf16-mixed"} if clock.half else {}
    settings |= {"devices": WORLD, "strategy": "ddp"} if WORLD > 1 else {}
    library.Trainer(max_steps=clock.steps, accelerator="cpu", **settings).fit(Job(), loader(tokenizer, data))


def distcore(folder: str, rows: str, clock: Clock, **changes: Any) -> None:
    """Distcore, with its defaults but for the arithmetic that all have in common."""
    from distcore import RunConfig, train

    settings: dict[str, Any] = {
        "data": rows, "model": folder, "global_batch_size": BATCH * WORLD, "lr": RATE, "max_steps": clock.steps,
        "strategy": "ddp" if WORLD > 1 else "single", "precision": "bf16" if clock.half else "fp32",
        "device": "cpu", "schedule": {"name": "constant"}, "clip": {"norm": None}, "eval_fraction": 0.001,
        "extensions": {"progress": False, f"{__file__}:Ticks": True}, "checkpoints": {"best": None},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        train(RunConfig(**settings | {"out": f"{out}/run"} | changes))


def fast(folder: str, rows: str, clock: Clock) -> None:
    """Distcore with its preset."""
    distcore(folder, rows, clock, preset="fast")


KINDS: dict[str, Callable[[str, str, Clock], None]] = {
    "by-hand": by_hand,
    "trainer": trainer,
    "trainer-grouped": grouped,
    "lightning": lightning,
    "accelerate": accelerated,
    "distcore": distcore,
    "distcore-fast": fast,
}


def main() -> None:
    """Run the kind that the command line names."""
    kind, folder, rows = sys.argv[1:4]
    torch.manual_seed(0)
    KINDS[kind](folder, rows, CLOCK)
    print(json.dumps(CLOCK.result()), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    CLOCK = Clock(int(sys.argv[4]), half=sys.argv[5] == "bf16")
    main()
