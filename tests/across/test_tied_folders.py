"""A folder's head is one under every strategy: tied, of its own, or its own where
the config ties it.

The first loss is that of a plain model, and exports have the same weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import strategy_chain
import torch
import transformers
import work_folder
from safetensors.torch import load_file, save_file

from distcore import RunConfig, launch, train
from distcore.cli.main import main

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]

WAYS = ("single", *strategy_chain.WAYS)
HEADS = ("tied", "untied", "tied, and another head")
TEXTS = [
    "the pig sleeps",
    "a cat eats apples",
    "the dog runs and the cat sleeps",
    "a pig",
    "dogs eat",
    "cats run fast",
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work_folder.enter(tmp_path, monkeypatch)
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    return tmp_path


def folder_of(here: Path, head: str) -> Path:
    """A Llama; its tokenizer has a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(
        models.BPE(
            vocab={"</s>": 0} | {sign: 1 + at for at, sign in enumerate(alphabet)}, merges=[]
        )
    )
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>").save_pretrained(
        here / "model"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=264,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=head != "untied",
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(here / "model")
    if head == "tied, and another head":
        file = here / "model/model.safetensors"
        save_file(
            load_file(file) | {"lm_head.weight": torch.randn(264, 16)},
            file,
            metadata={"format": "pt"},
        )
    return here / "model"


def run(here: Path, way: str, **changes: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the first step, and the weights of the export after another one.

    With a small ``eps`` Adam would step by the sign of gradients that are zero but for rounding.
    """
    out = here / f"run-{way.replace(':', '')}"
    config = RunConfig(
        **strategy_chain.options_of(way),
        task="causal-lm",
        task_options={"model": "model", "data": "texts.jsonl", "max_seq_len": 32, "dropout": 0.0},
        global_batch_size=6,
        max_steps=2,
        lr=1e-2,
        log_every=1,
        device="cpu",
        out=str(out),
        schedule={"name": "constant"},
        optimizer={"eps": 1e-2},
        extensions={"progress": False},
        **changes,
    )
    launch(train, config, nproc=1 if way == "single" else 2)
    to, merged = here / f"export-{out.name}", ["--merged"] if changes else []
    assert main(["checkpoint", "export", str(out), "--to", str(to), *merged]) == 0
    return strategy_chain.losses(out)[1], load_file(to / "model.safetensors")


def assert_one_run(here: Path, **changes: Any) -> dict[str, torch.Tensor]:
    first, weights = run(here, "single", **changes)
    for way in filter(strategy_chain.is_offered, WAYS[1:]):
        loss, others = run(here, way, **changes)
        assert loss == pytest.approx(first, rel=1e-5), way
        assert others.keys() == weights.keys(), way
        for name, value in weights.items():
            torch.testing.assert_close(
                others[name], value, rtol=1e-4, atol=1e-5, msg=f"{way}: {name}"
            )
    return weights


@pytest.mark.parametrize("head", HEADS)
def test_every_strategy_trains_and_exports_the_head_of_the_files(head: str, here: Path) -> None:
    folder_of(here, head)
    weights = assert_one_run(here)
    assert ("lm_head.weight" in weights) == (head != "tied")


@pytest.mark.needs("distcore-lora")
@pytest.mark.parametrize("head", ["tied", "tied, and another head"])
def test_an_adapter_of_the_head_merges_alike(head: str, here: Path) -> None:
    folder_of(here, head)
    weights = assert_one_run(here, lora={"rank": 2, "targets": ["lm_head", "q_proj"]})
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
