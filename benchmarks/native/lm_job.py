"""One run of the language-model job of benchmarks/peers.py under one library; prints seconds per 1,000 rows as JSON.

    python benchmarks/native/lm_job.py KIND MODEL_FOLDER ROWS.jsonl STEPS fp32|bf16

Every kind trains on the same prompts and completions, once: the loss is that of the completions. 32 rows per step, or
as many tokens of packed rows; AdamW at a constant 1e-4. The clock runs from the start of training, when rows are
tokenized, to the end of the last step. STEPS is how many steps one epoch has.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from distcore import hookimpl

BATCH, RATE, LONGEST = 32, 1e-4, 512


class Clock:
    """The time from ``start`` to the end of the last step."""

    def __init__(self, half: bool) -> None:
        self.half = half
        self.began = self.ended = (0.0, 0.0)

    def start(self) -> None:
        """Call it when training starts."""
        self.began = (time.process_time(), time.perf_counter())

    def tick(self) -> None:
        """Call it at the end of each step."""
        self.ended = (time.process_time(), time.perf_counter())


class Ticks:
    """An extension of distcore that tells the program's clock of start and steps."""

    @hookimpl
    def on_run_start(self) -> None:
        sys.modules["__main__"].CLOCK.start()

    @hookimpl
    def on_step_end(self) -> None:
        sys.modules["__main__"].CLOCK.tick()


def rows_of(file: str) -> list[dict[str, str]]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def by_hand(folder: str, file: str, steps: int, clock: Clock) -> None:
    """A loop as in the tutorials: rows are shuffled, and padded to the longest of their batch."""
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).train()
    data = []
    for row in rows_of(file):
        prompt, answer = (tokenizer(row[name], add_special_tokens=False).input_ids for name in ("prompt", "completion"))
        ids = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        data.append((ids, torch.cat([torch.full((len(prompt),), -100), ids[len(prompt) :]])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    clock.start()
    for chosen in torch.randperm(len(data)).split(BATCH):
        rows, labels = zip(*(data[index] for index in chosen.tolist()), strict=True)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        batch = {"input_ids": pad_sequence(list(rows), batch_first=True), "attention_mask": mask}
        with torch.autocast("cpu", torch.bfloat16) if clock.half else nullcontext():
            loss = model(**batch, labels=pad_sequence(list(labels), batch_first=True, padding_value=-100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def trl(folder: str, rows: str, steps: int, clock: Clock, **changes: Any) -> None:
    """TRL's SFTTrainer; without recomputing activations, which it does unless told otherwise."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Ticks(TrainerCallback):
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            clock.start()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            clock.tick()

    settings: Any = {
        "per_device_train_batch_size": BATCH, "learning_rate": RATE, "lr_scheduler_type": "constant",
        "num_train_epochs": 1, "max_grad_norm": 0.0, "report_to": [], "save_strategy": "no", "logging_steps": 10,
        "disable_tqdm": True, "use_cpu": True, "bf16": clock.half, "gradient_checkpointing": False,
        "max_length": LONGEST,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder),
            args=SFTConfig(output_dir=out, **settings | changes),
            train_dataset=Dataset.from_list(rows_of(rows)),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[Ticks()],
        ).train()


def grouped(folder: str, rows: str, steps: int, clock: Clock) -> None:
    """The SFTTrainer, rows of like length in a batch."""
    trl(folder, rows, steps, clock, train_sampling_strategy="group_by_length")


def packed(folder: str, rows: str, steps: int, clock: Clock) -> None:
    """The SFTTrainer, rows packed; as many tokens per step as 32 rows have."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokens = sum(len(tokenizer(row["prompt"] + row["completion"]).input_ids) + 1 for row in rows_of(rows))
    trl(folder, rows, steps, clock, packing=True, per_device_train_batch_size=max(1, round(tokens / steps / LONGEST)))


def distcore(folder: str, rows: str, steps: int, clock: Clock, **changes: Any) -> None:
    """Distcore, with its defaults but for the arithmetic that all have in common."""
    from distcore import RunConfig, train

    settings: dict[str, Any] = {
        "task": "causal-lm", "data": rows, "eval_data": rows, "model": folder, "global_batch_size": BATCH, "lr": RATE,
        "max_steps": steps, "max_seq_len": LONGEST, "device": "cpu", "schedule": {"name": "constant"},
        "clip": {"norm": None}, "precision": "bf16" if clock.half else "fp32", "checkpoints": {"best": None},
        "extensions": {"progress": False, f"{__file__}:Ticks": True},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        train(RunConfig(**settings | {"out": f"{out}/run"} | changes))


def fast(folder: str, rows: str, steps: int, clock: Clock) -> None:
    """Distcore with its preset."""
    distcore(folder, rows, steps, clock, preset="fast")


KINDS: dict[str, Callable[[str, str, int, Clock], None]] = {
    "by-hand": by_hand,
    "trl": trl,
    "trl-grouped": grouped,
    "trl-packed": packed,
    "distcore": distcore,
    "distcore-fast": fast,
}


def main() -> None:
    """Run the kind that the command line names."""
    kind, folder, rows = sys.argv[1:4]
    torch.manual_seed(0)
    KINDS[kind](folder, rows, int(sys.argv[4]), CLOCK)
    thousands = len(rows_of(rows)) / 1000
    cpu, wall = ((ended - began) / thousands for began, ended in zip(CLOCK.began, CLOCK.ended, strict=True))
    print(json.dumps({"cpu": cpu, "wall": wall}), flush=True)


if __name__ == "__main__":
    CLOCK = Clock(half=sys.argv[5] == "bf16")
    main()
