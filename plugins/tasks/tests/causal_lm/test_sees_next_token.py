"""Model folders of causal-lm that see the token which they are to predict, and
what makes them causal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from distcore.cli.main import main
from distcore.config import RunConfig
from distcore.engine.causality import BOUNDS, change_before
from distcore.errors import TaskError
from distcore.jobs.train import train
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.preference.task import Preference
from distcore_tasks.shared import causal as declaration
from distcore_tasks.shared.vocabulary import train_byte_level

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 70,
    "pad_token_id": 0,
}
FLAIR = {
    "vocab_size": 300,
    "emb_dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "max_position_embeddings": 70,
}
EXPERTS = SMALL | {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
GEMMA = SMALL | {"num_key_value_heads": 2, "head_dim": 16}
BOTH_SIDES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(
        (kind, SMALL, {"is_decoder": True})
        for kind in ("bert", "roberta", "electra", "rembert", "roformer", "ernie")
    ),
    ("xlm", FLAIR, {"causal": True}),
    (
        "xlnet",
        {"vocab_size": 300, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48},
        {"attn_type": "uni"},
    ),
    (
        "gemma3_text",
        GEMMA | {"use_bidirectional_attention": True},
        {"use_bidirectional_attention": False},
    ),
    ("llama", SMALL | {"is_causal": False}, {"is_causal": True}),
]
"""A type, its settings, and what of them makes it causal."""


def change(kind: str, **settings: Any) -> float:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    tokens = torch.randint(1, 250, (1, 24))
    with torch.no_grad():
        return change_before(lambda tokens: model(tokens, use_cache=False).logits, tokens)[0]


def change_of_small(folder: Path, kind: str, **settings: Any) -> float:
    AutoConfig.for_model(kind, **settings).save_pretrained(folder)
    small = declaration.small_decoder(folder)
    assert small is not None
    model: Any = small[0].eval()
    with torch.no_grad():
        return change_before(lambda tokens: model(tokens, use_cache=False).logits, small[1])[0]


@pytest.mark.parametrize(
    ("kind", "settings", "remedy"), BOTH_SIDES, ids=[kind for kind, *_ in BOTH_SIDES]
)
def test_a_model_that_sees_the_next_token_shows_it_with_one_layer(
    kind: str, settings: dict[str, Any], remedy: dict[str, Any], tmp_path: Path
) -> None:
    assert change_of_small(tmp_path, kind, **settings) > 10 * BOUNDS["fp32"]
    assert change_of_small(tmp_path, kind, **settings | remedy) < BOUNDS["fp32"] / 10


def test_a_large_vocabulary_and_many_layers_are_not_built_and_a_large_layer_is_left_to_the_run(
    tmp_path: Path,
) -> None:
    large = {"vocab_size": 250002, "num_hidden_layers": 80, "pad_token_id": 250001}
    assert change_of_small(tmp_path, "bert", **SMALL | large) > 10 * BOUNDS["fp32"]
    small: Any = declaration.small_decoder(tmp_path)
    assert (small[0].config.vocab_size, small[0].config.num_hidden_layers) == (
        declaration.TOKENS + 1,
        1,
    )
    AutoConfig.for_model(
        "bert", hidden_size=4096, num_attention_heads=32, intermediate_size=16384
    ).save_pretrained(tmp_path)
    assert declaration.small_decoder(tmp_path) is None


@pytest.mark.parametrize(
    ("kind", "settings", "remedy"), BOTH_SIDES, ids=[kind for kind, *_ in BOTH_SIDES]
)
def test_a_model_of_both_sides_is_far_beyond_the_bound_and_its_remedy_far_below(
    kind: str, settings: dict[str, Any], remedy: dict[str, Any], tmp_path: Path
) -> None:
    assert change(kind, **settings) > 10 * BOUNDS["fp32"]
    assert change(kind, **settings | remedy) < BOUNDS["fp32"] / 10
    tree = AutoConfig.for_model(kind, **settings).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(tree))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    said = ", ".join(f'"{key}": {json.dumps(value)}' for key, value in remedy.items())
    for task in (CausalLM(model=str(tmp_path)), Preference(model=str(tmp_path))):
        assert (
            f"write {said} into config.json of {tmp_path}, or train it with --task masked-lm"
            in task.causal.advice
        )


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "mamba", "rwkv", "bloom"])
def test_a_decoder_changes_nothing_before(kind: str) -> None:
    settings = EXPERTS if kind == "mixtral" else {"vocab_size": 300, "hidden_size": 32}
    layers = {"gpt2": "n_layer", "bloom": "n_layer"}.get(kind, "num_hidden_layers")
    heads = {"bloom": {"n_head": 2}, "gpt2": {"n_head": 2}}.get(kind, {})
    assert change(kind, **settings | {layers: 2} | heads) < BOUNDS["fp32"] / 10


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A BERT without ``is_decoder``, and rows to train it on."""
    tokens = train_byte_level(["some words of a text"], 300, ["<s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<s>", pad_token="<s>")
    shape: Any = AutoConfig.for_model("bert", **SMALL | {"vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    (tmp_path / "rows.jsonl").write_text('{"text": "some words of a text, and more words"}\n' * 40)
    return tmp_path


def run_of(folder: Path, out: str) -> RunConfig:
    options: dict[str, Any] = {
        "model": str(folder / "bert"),
        "data": str(folder / "rows.jsonl"),
        "eval_data": str(folder / "rows.jsonl"),
        "max_seq_len": 16,
    }
    return RunConfig(
        task="causal-lm",
        task_options=options,
        out=str(folder / out),
        max_steps=1,
        lr=1e-3,
        device="cpu",
        global_batch_size=4,
        nproc=1,
        extensions={"progress": False},
    )


def test_a_dry_run_and_a_run_of_several_ranks_refuse_it_before_ranks_start(
    bert: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distcore.jobs.train.launch_and_restart", pytest.fail)
    rows, model = bert / "rows.jsonl", bert / "bert"
    flags = [
        "--task",
        "causal-lm",
        "--model",
        str(model),
        "--data",
        str(rows),
        "--max-seq-len",
        "16",
    ]
    out = ["--out", str(bert / "run"), "--device", "cpu", "--max-steps", "1"]
    for more in (["--dry-run"], ["--nproc", "2", "--strategy", "ddp"]):
        assert main(["train", *flags, *out, *more]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith(
            "error: task CausalLM: the model sees the tokens that it is to predict: "
        )
        assert said.endswith(
            f'write "is_decoder": true into config.json of {model}, or train it with --task'
            " masked-lm"
        )


@pytest.mark.programs
def test_a_run_of_bert_is_refused_and_trains_as_a_decoder(bert: Path) -> None:
    with pytest.raises(
        TaskError, match=r'^task CausalLM: the model sees .*; write "is_decoder": true into config'
    ):
        train(run_of(bert, "refused"))
    assert not (bert / "refused").exists()
    file = bert / "bert/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_decoder": True}))
    assert train(run_of(bert, "trained"))["evaluation"]["loss"] > 0


def test_a_built_in_model_is_declared_causal() -> None:
    assert CausalLM().causal.tokens == "input_ids"
    assert CausalOptions().model in CausalLM.built_in
