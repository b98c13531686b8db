"""The jobs of benchmarks/peers.py, as a script of transformers has them: model, rows, and
how a batch is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from clock import LONGEST, SIZE
from torch.nn.utils.rnn import pad_sequence

LOADERS = {
    "rows": "AutoModelForSequenceClassification",
    "lm": "AutoModelForCausalLM",
    "mlm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "images": "AutoModelForImageClassification",
}


@dataclass(frozen=True)
class Parts:
    """What a loop needs."""

    model: Any
    """In training mode."""
    rows: Any
    """List of tokenized rows, or of images as tensors: made before the first step."""
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]]
    """Rows to a batch, padded to its longest row."""


def read(file: str) -> list[dict[str, Any]]:
    """Return the rows of a JSON Lines file."""
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def parts(
    job: str,
    folder: str,
    data: str,
    attn_implementation: str | None = None,
    multiple: int | None = None,
) -> Parts:
    """Return the parts of ``job``; ``multiple``: rows are padded to a multiple of it."""
    import transformers

    attention = {"attn_implementation": attn_implementation} if attn_implementation else {}
    model = getattr(transformers, LOADERS[job]).from_pretrained(folder, **attention).train()
    if job == "images":
        return Parts(model, images(data), stacked)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = globals()[f"{job}_rows"](tokenizer, read(data))
    collators: dict[str, Any] = {
        "rows": partial(transformers.DataCollatorWithPadding, tokenizer),
        "lm": lambda pad_to_multiple_of: padded,
        "mlm": partial(
            transformers.DataCollatorForLanguageModeling, tokenizer, mlm_probability=0.15
        ),
        "seq2seq": partial(transformers.DataCollatorForSeq2Seq, tokenizer, model),
    }
    return Parts(model, rows, collators[job](pad_to_multiple_of=multiple))


def rows_rows(tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return texts and labels."""
    ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=LONGEST["rows"])[
        "input_ids"
    ]
    return [{"input_ids": ids, "labels": row["label"]} for ids, row in zip(ids, rows, strict=True)]


def mlm_rows(tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return texts."""
    ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=LONGEST["mlm"])[
        "input_ids"
    ]
    return [{"input_ids": row} for row in ids]


def seq2seq_rows(tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return sources and targets."""
    sources, targets = ([row[name] for row in rows] for name in ("source", "target"))
    cut = {"truncation": True, "max_length": LONGEST["seq2seq"]}
    inputs, labels = (
        tokenizer(sources, **cut)["input_ids"],
        tokenizer(text_target=targets, **cut)["input_ids"],
    )
    return [{"input_ids": ids, "labels": row} for ids, row in zip(inputs, labels, strict=True)]


def lm_rows(tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return prompts with completions. The loss is that of the completions."""
    made = []
    for row in rows:
        prompt, answer = (
            tokenizer(row[name], add_special_tokens=False).input_ids
            for name in ("prompt", "completion")
        )
        answer = [*answer, tokenizer.eos_token_id]
        made.append({"input_ids": [*prompt, *answer], "labels": [-100] * len(prompt) + answer})
    return made


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return prompts with completions as a batch."""
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def images(folder: str) -> list[dict[str, Any]]:
    """Return the images of a folder with a folder per class, decoded, from -1 to 1."""
    import numpy as np
    from PIL import Image

    made = []
    for label, of_class in enumerate(sorted(Path(folder).iterdir())):
        for file in sorted(of_class.iterdir()):
            pixels = np.asarray(
                Image.open(file).convert("RGB").resize((SIZE, SIZE)), dtype=np.float32
            )
            made.append(
                {
                    "pixel_values": torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1),
                    "labels": label,
                }
            )
    return made


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return images as a batch."""
    pixels = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows])}
