"""One run of a job of benchmarks/peers.py under another library; each rank prints its seconds per
1,000 rows as JSON.

    python benchmarks/peer_runs/libraries.py JOB LIBRARY FOLDER DATA STEPS fp32|bf16 FLAGS
    alone, or under torchrun

FLAGS is a JSON object of the library's own settings. All train on the same rows, 32 per step and
rank, shuffled, with AdamW at a constant rate, in fp32 or under the library's mixed precision.
distcore need not be installed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from clock import BATCH, LONGEST, RATES, WORLD, Clock
from jobs import Parts, parts, read


class Run:
    """What the command line asks for."""

    def __init__(
        self, job: str, folder: str, data: str, steps: int, half: bool, flags: dict[str, Any]
    ) -> None:
        self.job, self.folder, self.data, self.half, self.flags = job, folder, data, half, flags
        self.clock, self.rate = Clock(job, steps), RATES[job]

    def flag(self, name: str, otherwise: Any = None) -> Any:
        """Take a flag out of those that go to the library as they are."""
        return self.flags.pop(name, otherwise)

    def parts(self) -> Parts:
        """Return the parts of the job; some flags are about them."""
        return parts(
            self.job,
            self.folder,
            self.data,
            self.flag("attn_implementation"),
            self.flag("pad_to_multiple_of"),
        )

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.01, fused=True)

    def loader(self, part: Parts, batch: int, sampler: Any = None) -> Any:
        """Return shuffled batches."""
        return torch.utils.data.DataLoader(
            part.rows,
            batch_size=batch,
            shuffle=sampler is None,
            sampler=sampler,
            drop_last=True,
            collate_fn=part.collate,
            num_workers=self.flag("num_workers", 0),
        )


def by_hand(run: Run) -> None:
    """A loop as in torch's tutorials."""
    part, accumulate, layout = run.parts(), run.flag("accumulate", 1), run.flag("channels_last")
    model, clock = part.model, run.clock
    sampler: Any = None
    if layout:
        model = model.to(memory_format=torch.channels_last)
    optimizer = run.optimizer(model)
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")
        sampler = torch.utils.data.DistributedSampler(part.rows)
        model = torch.nn.parallel.DistributedDataParallel(model)
    batches = run.loader(part, BATCH // accumulate, sampler)
    if run.flag("compile"):
        model = torch.compile(model)
    clock.start()
    for number, batch in zip(range(clock.steps * accumulate), batches, strict=False):
        if layout:
            batch["pixel_values"] = batch["pixel_values"].to(memory_format=torch.channels_last)
        last = (number + 1) % accumulate == 0
        with torch.autocast("cpu", torch.bfloat16) if run.half else nullcontext():
            loss = model(**batch).loss
        with nullcontext() if last or WORLD == 1 else model.no_sync():
            (loss / accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()


def accelerate(run: Run) -> None:
    """Accelerate, as its quick tour has it."""
    from accelerate import Accelerator

    part, accumulate = run.parts(), run.flags.get("gradient_accumulation_steps", 1)
    batches = run.loader(part, BATCH // accumulate)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if run.half else "no", **run.flags)
    prepared: Any = accelerator.prepare(part.model, run.optimizer(part.model), batches)
    model, optimizer, batches = prepared
    run.clock.start()
    for _, batch in zip(range(run.clock.steps * accumulate), batches, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                run.clock.tick()


def settings(run: Run, out: str) -> dict[str, Any]:
    """Return the arguments of the HF Trainer and TRL that the job asks for."""
    length = {"num_train_epochs": 1} if run.job == "lm" else {"max_steps": run.clock.steps}
    return (
        length
        | {
            "output_dir": out,
            "per_device_train_batch_size": BATCH,
            "learning_rate": run.rate,
            "bf16": run.half,
            "lr_scheduler_type": "constant",
            "weight_decay": 0.01,
            "max_grad_norm": 0.0,
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 10,
            "disable_tqdm": True,
            "use_cpu": True,
        }
        | run.flags
    )


def callback(clock: Clock) -> Any:
    """Return a callback that tells the clock of the start and of steps."""
    from transformers import TrainerCallback

    class Ticks(TrainerCallback):
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            clock.start()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            clock.tick()

    return Ticks()


def trainer(run: Run) -> None:
    """The HF Trainer."""
    from transformers import Trainer, TrainingArguments

    part = run.parts()
    with tempfile.TemporaryDirectory() as out:
        Trainer(
            model=part.model,
            args=TrainingArguments(**settings(run, out)),
            train_dataset=part.rows,
            data_collator=part.collate,
            callbacks=[callback(run.clock)],
        ).train()


def trl(run: Run) -> None:
    """TRL's SFTTrainer, without recomputing activations, which it does unless told otherwise."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer: Any = AutoTokenizer.from_pretrained(run.folder)
    attention = run.flag("attn_implementation")
    if run.flags.get("packing"):  # as many tokens per step as 32 rows have
        tokens = sum(
            len(tokenizer(row["prompt"] + row["completion"]).input_ids) + 1
            for row in read(run.data)
        )
        run.flags["per_device_train_batch_size"] = max(
            1, round(tokens / run.clock.steps / LONGEST["lm"])
        )
    own = {"gradient_checkpointing": False, "max_length": LONGEST["lm"]}
    with tempfile.TemporaryDirectory() as out:
        SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                run.folder, **({"attn_implementation": attention} if attention else {})
            ),
            args=SFTConfig(**settings(run, out) | own),
            train_dataset=Dataset.from_list(read(run.data)),
            processing_class=tokenizer,
            callbacks=[callback(run.clock)],
        ).train()


def lightning(run: Run) -> None:
    """Lightning, without what it writes."""
    import lightning as library

    part, compiled = run.parts(), run.flag("compile")
    batches = run.loader(part, BATCH // run.flags.get("accumulate_grad_batches", 1))

    class Job(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.compile(part.model) if compiled else part.model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return run.optimizer(self.model)

        def on_train_start(self) -> None:
            run.clock.start()

        def on_train_batch_end(self, *given: Any) -> None:
            if self.global_step > run.clock.done:
                run.clock.tick()

    given: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given |= {"precision": "bf16-mixed"} if run.half else {}
    given |= {"devices": WORLD, "strategy": "ddp"} if WORLD > 1 else {}
    library.Trainer(max_steps=run.clock.steps, accelerator="cpu", **given | run.flags).fit(
        Job(), batches
    )


LIBRARIES: dict[str, Callable[[Run], None]] = {
    "by-hand": by_hand,
    "trainer": trainer,
    "trl": trl,
    "lightning": lightning,
    "accelerate": accelerate,
}


def main() -> None:
    """Run the library that the command line names."""
    job, library, folder, data, steps, precision, flags = sys.argv[1:]
    torch.manual_seed(0)
    run = Run(job, folder, data, int(steps), precision == "bf16", json.loads(flags))
    LIBRARIES[library](run)
    run.clock.show()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
