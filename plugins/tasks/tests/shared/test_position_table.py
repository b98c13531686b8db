"""The longest row that passes through a model is the longest that a run takes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, PreTrainedTokenizerFast

from distcore.errors import ConfigError, ModelError
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.causal_lm.vocabulary import train_tokenizer
from distcore_tasks.shared.position_table import measure_positions
from distcore_tasks.shared.pretrained import (
    check_length,
    load_tokenizer,
    positions,
    rotation_warning,
)
from distcore_tasks.shared.sources import data_warnings

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 24,
    "pad_token_id": 1,
}
BART: dict[str, Any] = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 24,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Bert": (SIZES, 24),
    "Roberta": (SIZES, 22),
    "Camembert": (SIZES, 22),
    "XLMRoberta": (SIZES | {"pad_token_id": 3}, 20),
    "MPNet": (SIZES, 22),
    "Data2VecText": (SIZES, 22),
    "Xmod": (SIZES | {"languages": ["en_XX"], "default_language": "en_XX"}, 22),
    "Longformer": (SIZES | {"attention_window": [4, 4]}, 22),
    "IBert": (SIZES, 22),
    "Electra": (SIZES | {"embedding_size": 16}, 24),
    "GPT2": (
        {
            "vocab_size": 40,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 24,
            "pad_token_id": 1,
        },
        24,
    ),
    "OPT": (SIZES | {"ffn_dim": 16, "word_embed_proj_dim": 16}, 24),
    "Bart": (BART, 24),
    "T5": (
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2},
        0,
    ),
}
"""Settings of a small model by its name in transformers, and the tokens that it
takes; 0: any number.
"""


def folder_of(name: str, folder: Path, **changes: Any) -> Path:
    config = getattr(transformers, f"{name}Config")(**MODELS[name][0] | changes)
    config.save_pretrained(folder)
    return folder


def passes(folder: Path, tokens: int) -> bool:
    """Whether a row of so many tokens passes through the whole model."""
    model: Any = AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    row = torch.full((1, tokens), 5)
    inputs = {"input_ids": row} | (
        {"decoder_input_ids": row} if model.config.is_encoder_decoder else {}
    )
    try:
        with torch.no_grad():
            model(**inputs)
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("name", MODELS)
def test_the_longest_row_is_measured_where_positions_do_not_start_at_zero(
    name: str, tmp_path: Path
) -> None:
    folder, most = folder_of(name, tmp_path), MODELS[name][1]
    assert (positions("m", folder) or 0) == most
    if not most:
        assert passes(folder, 40)
        return check_length("m", folder, 4000)
    assert measure_positions(folder) == most
    assert passes(folder, most)
    if name != "Longformer":  # it fills a row up to its window, and fails earlier
        assert not passes(folder, most + 1)
    check_length("m", folder, most)
    with pytest.raises(
        ConfigError,
        match=rf"max_seq_len = {most + 1}: model m has positions for {most} tokens; use",
    ):
        check_length("m", folder, most + 1)
    return None


def test_a_config_without_its_padding_token_is_measured_too(tmp_path: Path) -> None:
    folder = folder_of("Camembert", tmp_path)
    file = folder / "config.json"
    file.write_text(
        json.dumps(
            {key: value for key, value in json.loads(file.read_text()).items() if key[:3] != "pad"}
        )
    )
    assert positions("m", folder) == 22


def test_a_short_row_needs_no_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("Camembert", tmp_path)
    monkeypatch.setattr("distcore_tasks.shared.position_table.measure_positions", pytest.fail)
    check_length("m", folder, 22)


def test_a_padding_token_that_the_embedding_lacks_is_named(tmp_path: Path) -> None:
    """Llama 2 with a padding token that was added to its tokenizer alone:
    transformers names no cause.
    """
    tokenizer: PreTrainedTokenizerFast = train_tokenizer(["a b c d"], 300)
    size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    problem = (
        rf"^model m: its tokenizer's padding token '<pad>' is token {size}, but config.json has a"
        r" vocabulary of "
    )
    with pytest.raises(
        ModelError,
        match=problem + rf"{size} \(0 to {size - 1}\); set pad_token in tokenizer_config",
    ):
        load_tokenizer("m", tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": size + 1})
    )
    assert load_tokenizer("m", tmp_path).pad_token_id == size


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "rope_theta": 1e4}
LONG_ROWS: dict[str, Any] = SIZES | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
    "original_max_position_embeddings": 8,
    "rope_parameters": LONG | {"rope_type": "longrope"},
}
"""A little Phi-3 for long rows, whose frequencies change behind 8 tokens."""


def test_a_row_that_turns_the_positions_of_those_beside_it_is_said(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(transformers.Phi3Config(**LONG_ROWS)).eval()
    model.config.save_pretrained(tmp_path)
    short, rows = torch.randint(3, 40, (1, 6)), torch.randint(3, 40, (2, 12))
    rows[0, :6] = short[0]
    mask = (torch.arange(12) < torch.tensor([[6], [12]])).long()
    with torch.no_grad():
        alone = model(short).last_hidden_state[0]
        beside = model(rows, attention_mask=mask).last_hidden_state[0, :6]
    assert (alone - beside).abs().max() > 0.1  # else transformers has mended it
    said = (
        f"model {tmp_path}: a row of more than 8 tokens has rotary frequencies of its own"
        " ('longrope' in config.json), and gives them to the rows of its micro-batch: results"
        " depend on micro-batches; use --max-seq-len 8, or --micro-batch-size 1 with"
        " --padding-free off"
    )
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    options: dict[str, Any] = {"model": str(tmp_path), "data": "rows.jsonl", "eval_data": "x.jsonl"}
    assert said in data_warnings(CausalLM(max_seq_len=9, **options))
    assert said not in data_warnings(CausalLM(max_seq_len=8, **options))


def test_the_older_form_of_long_rotations_is_read(tmp_path: Path) -> None:
    scaling = LONG | {"type": "su"}
    older = {"model_type": "phi3", "original_max_position_embeddings": 8, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert "more than 8 tokens" in next(rotation_warning("m", tmp_path, 9))
    assert not [*rotation_warning("m", tmp_path, 8)]
