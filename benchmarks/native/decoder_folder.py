"""A folder with a Llama of random weights, a tokenizer of whole words, and rows as long
as the model takes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 2048,
    },
}
"""TinyLlama's and Llama 3's shapes, with rows of 2,048 tokens."""


def write_folder(folder: Path, size: str, rows: int) -> None:
    """Write ``model``, in bf16, and ``train.jsonl`` and ``eval.jsonl``, whose documents have
    one row's tokens each.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = SHAPES[size]
    words = ["<unk>", "<end>", *(f"w{number}" for number in range(shape["vocab_size"] - 2))]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, tie_word_embeddings=False, eos_token_id=1, bos_token_id=None, pad_token_id=1
    )
    config.dtype = torch.bfloat16
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "model")
    # each document ends with one more token
    choose, length = random.Random(0), shape["max_position_embeddings"] - 1
    for name, count in (("train", rows), ("eval", 2)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                file.write(
                    json.dumps({"text": " ".join(choose.choices(words[2:], k=length))}) + "\n"
                )
