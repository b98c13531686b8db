"""Small language models with random weights, and the tokenizers that models of their
kind have, as folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

ACCENTS = "\u00e4\u00f6"
TEXTS = [
    f"The quick brown fox didn't jump over {number} dogs; it's \u6c49\u5b57, "
    f" {ACCENTS * (number % 3)}\n\n{number}"
    for number in range(200)
]
ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
    "rope_type": "llama3",
}
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "gpt2": (GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}, "bytes"),
    "llama": (LlamaConfig, SIZES | {"attention_bias": True}, "pieces"),
    "llama3": (
        LlamaConfig,
        SIZES | {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
        "{1,3}",
    ),
    "mistral": (MistralConfig, SIZES | {"head_dim": 24, "sliding_window": None}, "pieces"),
    "qwen2": (Qwen2Config, SIZES, ""),
    "qwen3": (Qwen3Config, SIZES | {"head_dim": 32}, ""),
}
"""By name: the config's class, its values, and the tokenizer: by bytes, of pieces, or digits at
once in Llama 3's.
"""


def make(name: str, folder: Path) -> Path:
    """Write the model ``name`` to the new ``folder``, with a few more rows in the embedding
    than tokens; return it.
    """
    config, values, kind = MODELS[name]
    tokenizer = _pieces() if kind == "pieces" else _bytes(None if kind == "bytes" else kind)
    make_fast: Any = PreTrainedTokenizerFast
    fast = make_fast(tokenizer_object=tokenizer, pad_token="</s>", **ENDS)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    numbers = {"bos_token_id": fast.bos_token_id, "eos_token_id": fast.eos_token_id}
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config(vocab_size=len(fast) + 3, **numbers, **values))
    for parameter in model.parameters():  # none of them is 0 or 1
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    model.save_pretrained(folder)
    return folder


def _bytes(digits: str | None) -> Tokenizer:
    """Return byte-level pairs, which split texts as GPT-2 does, or, given ``digits``, as Llama
    3 and Qwen do.
    """
    tokenizer = Tokenizer(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=digits is None)
    split = [] if digits is None else [pre_tokenizers.Split(Regex(SPLIT % digits), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, whole]) if split else whole
    tokenizer.decoder = decoders.ByteLevel()
    special = [*ENDS.values()]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if digits == "{1,3}":
        tokenizer.post_processor = _begins(tokenizer)
    return tokenizer


def _pieces() -> Tokenizer:
    """Return the tokenizer that transformers makes of SentencePiece's, as of Llama 2."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", *ENDS.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator((text.replace("\u6c49", "") for text in TEXTS), trainer)
    known = json.loads(tokenizer.to_str())
    known["added_tokens"] = [
        token for token in known["added_tokens"] if not token["content"].startswith("<0x")
    ]
    tokenizer = Tokenizer.from_str(json.dumps(known))
    tokenizer.post_processor = _begins(tokenizer)
    return tokenizer


def _begins(tokenizer: Tokenizer) -> Any:
    numbers = [("<s>", tokenizer.token_to_id("<s>"))]
    return processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=numbers
    )
