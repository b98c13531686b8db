"""Real trainers on a small BERT: each trains, saves after ``SAVED`` steps, and trains on, as
distcore must from there.

Every step has all rows, and there is no dropout, so no order and no mask can differ.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distcore import load_config
from distcore.lab import resolve

ROWS, STEPS, SAVED, WARM_UP = 16, 9, 4, 2
LR, DECAY = 5e-3, 0.1


def job(folder: Path) -> Path:
    """Return the config file of a job in ``folder``, with its rows and its model beside it."""
    import transformers as hf
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = [f"w{number}" for number in range(40)]
    lines = [
        {"text": " ".join(words[(7 * row + at * at) % 40] for at in range(12)), "label": row % 3}
        for row in range(ROWS)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    base = Tokenizer(
        WordLevel({word: n for n, word in enumerate([*special, *words])}, unk_token="[UNK]")
    )
    base.pre_tokenizer = Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer: Any = hf.PreTrainedTokenizerFast
    tokenizer(tokenizer_object=base, **names).save_pretrained(folder / "bert")
    torch.manual_seed(0)
    tiny = hf.BertConfig(  # type: ignore[call-arg]  # the labels are an argument of its base class
        vocab_size=44,
        hidden_size=30,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=62,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    hf.BertForSequenceClassification(tiny).save_pretrained(folder / "bert")
    config = {
        "task": "text-classification",
        "model": str(folder / "bert"),
        "data": str(folder / "rows.jsonl"),
        "eval_data": str(folder / "rows.jsonl"),
        "dropout": 0.0,
        "max_seq_len": 32,
        "device": "cpu",
        "precision": "fp32",
        "global_batch_size": ROWS,
        "max_steps": STEPS,
        "lr": LR,
        "schedule": {"name": "linear", "warmup_steps": WARM_UP},
        "optimizer": {"weight_decay": DECAY},
        "log_every": 1,
        "eval_at_epoch_end": False,
        "checkpoints": {"best": None},
        "extensions": {"progress": False},
    }
    (folder / "job.yaml").write_text(json.dumps(config))
    return folder / "job.yaml"


def model_and_rows(file: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return the model of the job, and all its rows as distcore tokenizes them."""
    import transformers as hf

    config = load_config(str(file), {})
    resolved = resolve(config)
    rows = resolved.task.prepare(resolved.config).train.batch(np.arange(ROWS))
    return hf.AutoModelForSequenceClassification.from_pretrained(
        config.task_options["model"]
    ).train(), dict(rows)


def rate(step: int) -> float:
    """Return the factor on the rate: linear, after a warm-up."""
    return step / WARM_UP if step < WARM_UP else (STEPS - step) / (STEPS - WARM_UP)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of a usual script."""
    named = list(model.named_parameters())
    exempt = ("bias", "LayerNorm.weight")
    return [
        {
            "params": [p for n, p in named if not any(part in n for part in exempt)],
            "weight_decay": DECAY,
        },
        {"params": [p for n, p in named if any(part in n for part in exempt)], "weight_decay": 0.0},
    ]


def deepspeed(file: Path, out: Path, stage: int, rank: int, size: int) -> list[float]:
    """Train by DeepSpeed's engine in one rank of a launch."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as library

    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled on first use
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    library.init_distributed("gloo")
    model, rows = model_and_rows(file)
    optimizer = torch.optim.AdamW(groups(model), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 100, "sub_group_size": 5000}
    config = {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // size,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    engine, *_ = library.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    losses = []
    for step in range(STEPS):
        loss = engine(**{key: value[rank::size] for key, value in rows.items()}).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / size)
        if step + 1 == SAVED:
            engine.save_checkpoint(str(out))
    torch.distributed.barrier()
    return losses


def fully_sharded(file: Path, folder: Path, rank: int, size: int, first: int = 0) -> list[float]:
    """Train by FSDP2 in one rank of a launch; save by torch.distributed.checkpoint, or go
    on from step ``first``.

    What is saved lies in two folders: as scripts do it, and as Accelerate does, whose
    FSDP needs a GPU.
    """
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model, rows = model_and_rows(file)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (size,))
    for layer in (*model.bert.encoder.layer, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(groups(model), lr=LR)
    if first:
        weights, state = get_state_dict(model, optimizer)
        state_dict_loader.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        for group in optimizer.param_groups:
            group["initial_lr"] = LR
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate, last_epoch=first - 1)
    losses = []
    for step in range(first, STEPS):
        loss = model(**{key: value[rank::size] for key, value in rows.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / size)
        if step + 1 == SAVED:
            weights, state = get_state_dict(model, optimizer)
            state_dict_saver.save(
                {"app": {"model": weights, "optim": state}}, checkpoint_id=folder / "script"
            )
            state_dict_saver.save(
                {"model": weights}, checkpoint_id=folder / "state/pytorch_model_fsdp_0"
            )
            state_dict_saver.save({"optimizer": state}, checkpoint_id=folder / "state/optimizer_0")
    torch.distributed.destroy_process_group()
    return losses


def trainer(file: Path, out: Path, lr: float = LR, schedule: str = "linear") -> list[float]:
    """Train by the Trainer of transformers."""
    import transformers as hf

    model, rows = model_and_rows(file)
    data = [{key: value[row] for key, value in rows.items()} for row in range(ROWS)]
    arguments = hf.TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=lr,
        weight_decay=DECAY,
        warmup_steps=WARM_UP,
        lr_scheduler_type=schedule,
        logging_steps=1,
        save_steps=SAVED,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        max_grad_norm=1.0,
    )
    run = hf.Trainer(model=model, args=arguments, train_dataset=data)
    run.train()
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def accelerate(file: Path, out: Path) -> list[float]:
    """Train by Accelerate, in one process."""
    from accelerate import Accelerator

    model, rows = model_and_rows(file)
    optimizer = torch.optim.AdamW(groups(model), lr=LR)
    accelerator = Accelerator(cpu=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    losses = []
    for step in range(STEPS):
        loss = model(**rows).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED:
            accelerator.save_state(str(out))
    return losses


def lightning(file: Path, out: Path) -> list[float]:
    """Train by Lightning, whose module has the model as an attribute."""
    import lightning as library

    losses: list[float] = []

    class Module(library.LightningModule):  # type: ignore[misc]  # is not installed where mypy runs
        def __init__(self) -> None:
            super().__init__()
            self.model, self.rows = model_and_rows(file)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(groups(self.model), lr=LR)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    module = Module()
    data: Any = [{key: value[row] for key, value in module.rows.items()} for row in range(ROWS)]
    saver = library.pytorch.callbacks.ModelCheckpoint(
        dirpath=out, every_n_train_steps=SAVED, save_top_k=-1
    )
    run = library.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        gradient_clip_val=1.0,
        enable_model_summary=False,
    )
    run.fit(module, torch.utils.data.DataLoader(data, batch_size=ROWS))
    return losses


def logged(run: Path) -> list[float]:
    """Return the losses of a run folder, by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]
