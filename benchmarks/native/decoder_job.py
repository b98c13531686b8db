"""One run of benchmarks/decoder.py under one library; prints its figures as JSON.

python benchmarks/native/decoder_job.py KIND FOLDER train|lora ROWS STEPS
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distcore import Progress, Run, hookimpl

WARM, RATE = 5, 1e-5
DEVICE = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Clock:
    """The seconds of each step after the first ``WARM``, each waited for on the device."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.loss, self._step, self._last = float("nan"), 0, 0.0

    def tick(self) -> None:
        """Call it at the end of each step."""
        if DEVICE != "cpu":
            torch.accelerator.synchronize()
        now, self._step = time.perf_counter(), self._step + 1
        if self._step > WARM:
            self.seconds.append(now - self._last)
        self._last = now


class Ticks:
    """An extension of distcore that tells the program's clock of steps, and of the loss."""

    @hookimpl
    def on_step_end(self, run: Run, progress: Progress) -> None:
        sys.modules["__main__"].CLOCK.tick()

    @hookimpl
    def on_log(self, record: dict[str, float]) -> None:
        sys.modules["__main__"].CLOCK.loss = record["loss"]


def blocks(folder: Path) -> torch.Tensor:
    """Return the rows' tokens, (rows, tokens)."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    texts = [
        json.loads(line)["text"]
        for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return torch.tensor(
        [
            [*ids, tokenizer.eos_token_id]
            for ids in tokenizer(texts, add_special_tokens=False).input_ids
        ]
    )


def model_of(folder: Path, job: str) -> Any:
    """Return the model: in fp32, or its base in bf16 below an adapter."""
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if job == "train" else torch.bfloat16
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=dtype, attn_implementation="sdpa"
    )
    if job == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
        )
    return model


def by_hand(folder: Path, job: str, rows: int, steps: int, compiled: bool = False) -> None:
    """A loop as in torch's tutorials."""
    model = model_of(folder, job).to(DEVICE).train()
    data = blocks(folder).pin_memory() if DEVICE == "cuda" else blocks(folder)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, fused=True
    )
    forward = torch.compile(model) if compiled else model
    for chosen in torch.randperm(len(data)).split(rows):
        ids = data[chosen].to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        CLOCK.tick()
    CLOCK.loss = float(loss)


def trainer(folder: Path, job: str, rows: int, steps: int, compiled: bool = False) -> None:
    """The HF Trainer, with its documented flags of speed."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticking(TrainerCallback):
        def on_step_end(self, *given: Any, **named: Any) -> None:
            CLOCK.tick()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any
        ) -> None:
            CLOCK.loss = (logs or {}).get("loss", CLOCK.loss)

    data = [{"input_ids": ids, "labels": ids} for ids in blocks(folder)]
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=rows,
            num_train_epochs=1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            logging_steps=10,
            disable_tqdm=True,
            bf16=True,
            optim="adamw_torch_fused",
            dataloader_num_workers=2,
            torch_compile=compiled,
            use_cpu=DEVICE == "cpu",
        )
        Trainer(
            model=model_of(folder, job), args=arguments, train_dataset=data, callbacks=[Ticking()]
        ).train()


def distcore(
    folder: Path, job: str, rows: int, steps: int, base: str = "auto", **changes: Any
) -> None:
    """Distcore with its defaults, but for the arithmetic that all have in common."""
    from distcore import RunConfig, train

    lora = {"rank": 16, "alpha": 32, "targets": TARGETS, "base": base} if job == "lora" else {}
    tokens = blocks(folder).shape[1]
    settings: dict[str, Any] = {
        "task": "causal-lm",
        "data": str(folder / "train.jsonl"),
        "eval_data": str(folder / "eval.jsonl"),
        "model": str(folder / "model"),
        "global_batch_size": rows,
        "micro_batch_size": rows,
        "lr": RATE,
        "max_steps": steps,
        "max_seq_len": tokens,
        "schedule": {"name": "constant"},
        "clip": {"norm": None},
        "precision": "bf16",
        "save_every": 0,
        "checkpoints": {"best": None},
        "lora": lora,
        "log_level": "error",
        "extensions": {"progress": False, f"{__file__}:Ticks": True},
        "optimizer": {"weight_decay": 0.01},
    }
    with tempfile.TemporaryDirectory() as out:
        train(RunConfig(**settings | {"out": f"{out}/run"} | changes))


KINDS: dict[str, Callable[[Path, str, int, int], None]] = {
    "by-hand": by_hand,
    "by-hand-compiled": partial(by_hand, compiled=True),
    "trainer": trainer,
    "trainer-compiled": partial(trainer, compiled=True),
    "distcore": distcore,
    "distcore-compiled": partial(distcore, compile="regions"),
    "distcore-nf4": partial(distcore, base="nf4"),
}


def flops_per_token(folder: Path, job: str) -> float:
    """Return the operations of a step per token: products of layers, and attention to half
    of the tokens before.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(folder / "model")
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    size -= config.vocab_size * config.hidden_size  # the embedding is looked up
    attention = 6 * config.num_hidden_layers * config.hidden_size * config.max_position_embeddings
    return float((6 if job == "train" else 4) * size + attention)


def main() -> None:
    """Run the kind that the command line names."""
    kind, folder, job, rows = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.manual_seed(0)
    KINDS[kind](folder, job, rows, int(sys.argv[5]))
    tokens = blocks(folder).shape[1] * rows
    peak = torch.accelerator.max_memory_allocated() if DEVICE != "cpu" else 0
    print(
        json.dumps(
            {
                "tokens_per_second": tokens / statistics.median(CLOCK.seconds),
                "peak_bytes": peak,
                "loss": CLOCK.loss,
                "flops_per_token": flops_per_token(folder, job),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    CLOCK = Clock()
    main()
