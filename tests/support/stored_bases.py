"""Small models on disk in a given dtype, with an adapter on a base that is stored in some way,
and runs on them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from distcore import RunConfig, train
from distcore.checkpoint import Checkpoint
from distcore.cli.main import main

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "embedding_size": 32,
}
DISTILBERT = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
}  # fmt: skip
ENCODERS = ("bert", "distilbert", "electra", "roberta", "xlm-roberta")

STRATEGIES = (
    "single",
    "ddp",
    "fsdp",
    "fsdp:param_dtype=precision",
    "deepspeed:2",
    "deepspeed:3",
    "mesh:shard=2",
    "mesh:tp=2",
    "horovod",
    "accelerate",
)
RUNS = [
    pytest.param(
        strategy, precision, marks=() if (strategy, precision) in quick else pytest.mark.slow
    )
    for quick in [{("ddp", "fp32"), ("fsdp", "bf16"), ("deepspeed:3", "fp32")}]
    for strategy in STRATEGIES
    for precision in ("fp32", "bf16")
]
"""Strategies and precisions: each is compared in the slow tests, these three in every one."""


def folder_of(folder: Path, kind: str, dtype: torch.dtype, **sizes: int) -> Path:
    """A folder with random weights in ``dtype``."""
    torch.manual_seed(0)
    given = SMALL | sizes
    if kind == "distilbert":
        given = {"vocab_size": given["vocab_size"]} | {
            own: given[name] for own, name in DISTILBERT.items()
        }
    config = transformers.AutoConfig.for_model(kind, **given)
    loader: Any = (
        transformers.AutoModelForMaskedLM if kind in ENCODERS else transformers.AutoModelForCausalLM
    )
    model = loader.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.to(dtype).save_pretrained(folder)
    return folder


def adapted(folder: Path, base: str, kind: str, **changes: Any) -> Any:
    """The model of ``folder``, in fp32, with an adapter that does something."""
    from distcore_lora.adapter import inject

    loader: Any = (
        transformers.AutoModelForMaskedLM if kind in ENCODERS else transformers.AutoModelForCausalLM
    )
    model = loader.from_pretrained(folder).float().eval()
    inject(
        RunConfig(**{"lora": {"rank": 2, "alpha": 4.0, "base": base}, "seed": 0} | changes),
        model,
        folder,
    )
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return model


def steps(model: Any, half: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of three steps, and the trained parameters after them."""
    torch.manual_seed(2)
    tokens = torch.randint(3, 100, (4, 12))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [parameter.detach() for parameter in trained]


def trained_base(folder: Path) -> Path:
    """Write rows to ``folder``, and a Llama that was trained on them, in
    bf16; return the folder.
    """
    lines = [
        {"text": " ".join(["one", "two", "three", "four"][: i % 4 + 1] * (i % 5 + 1))}
        for i in range(60)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    train(job(folder, "whole", model="llama-tiny", tokenizer={"vocab_size": 300}))
    assert main(["checkpoint", "export", str(folder / "whole"), "--to", str(folder / "model")]) == 0
    tensors = load_file(folder / "model/model.safetensors")
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(half, folder / "model/model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def job(
    folder: Path, out: str, model: str, tokenizer: dict[str, Any] | None = None, **changes: Any
) -> RunConfig:
    options = {"tokenizer": tokenizer} if tokenizer else {}
    given: dict[str, Any] = {
        "task": "causal-lm",
        "data": str(folder / "rows.jsonl"),
        "model": model,
        "task_options": options,
        "out": str(folder / out),
        "device": "cpu",
        "max_steps": 3,
        "global_batch_size": 8,
        "max_seq_len": 16,
        "dropout": 0.0,
        "log_every": 1,
        "log_level": "error",
        "extensions": {"progress": False},
        "lr": 1e-2,
        "precision": "fp32",
    }
    return RunConfig(**given | changes)


def result(
    folder: Path, name: str, base: str, model: str = "model", **changes: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of a run with an adapter, and the tensors of its checkpoint."""
    out = f"{name}-{base}".replace(":", "_").replace("=", "_")
    report = train(job(folder, out, str(folder / model), lora={"rank": 2, "base": base}, **changes))
    lines = map(json.loads, (folder / out / "metrics.jsonl").read_text().splitlines())
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    checkpoint = Checkpoint(max((folder / out / "checkpoints").iterdir()))
    tensors = {key: checkpoint[key] for key in checkpoint if key.startswith("model/")}
    return [*losses, report["evaluation"]["loss"]], tensors
