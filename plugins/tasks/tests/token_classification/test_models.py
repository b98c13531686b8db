"""The model families: a row's loss alone and in a batch, and what transformers makes of
it; what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedTokenizerFast

from distcore.config import RunConfig
from distcore.errors import ModelError
from distcore_tasks.shared.bert import SHAPES
from distcore_tasks.shared.pretrained import load_tokenizer
from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece
from distcore_tasks.token_classification.models import build_model
from distcore_tasks.token_classification.options import TagOptions
from distcore_tasks.token_classification.task import TokenClassification
from distcore_tasks.token_classification.words import load_words_tokenizer, tokenize_words

WORDS = ["Ada", "came", "to", "London", "and", "wrote"]
ROWS: list[dict[str, Any]] = [
    {
        "tokens": [WORDS[(row + at) % 6] for at in range(count)],
        "tags": [(row + at) % 3 for at in range(count)],
    }
    for row, count in enumerate([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5])
]
BERT = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 70,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "roberta": BERT,
    "distilbert": {"vocab_size": 400, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "gpt2": {"vocab_size": 400, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
}


def byte_level() -> Any:
    """A tokenizer as GPT-2 and RoBERTa have it, for which a word without a space before
    it is another word.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(["".join(f" {word}" for word in WORDS)] * 20, trainer)
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=tokenizer, pad_token="<pad>")


def saved(kind: str, folder: Path) -> str:
    """A model folder with random, large weights and the tokenizer of its family."""
    torch.manual_seed(0)
    model: Any = AutoModelForTokenClassification.from_config(
        AutoConfig.for_model(kind, **FAMILIES[kind])
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder / kind)
    words = as_transformers(train_wordpiece(WORDS, 100))
    (byte_level() if kind in ("roberta", "gpt2") else words).save_pretrained(folder / kind)
    return str(folder / kind)


def task_of(folder: Path, **options: Any) -> TokenClassification:
    (folder / "words.json").write_text(json.dumps(ROWS))
    file = str(folder / "words.json")
    given: dict[str, Any] = {"data": file, "eval_data": file, "dropout": 0.0, "max_seq_len": 64}
    return TokenClassification(**(given | options))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_row_has_one_loss_alone_and_padded_and_it_is_that_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    task = task_of(tmp_path, model=saved(kind, tmp_path))
    data: Any = task.prepare(RunConfig())
    torch.manual_seed(0)
    model: Any = task.build_model(RunConfig(), data).eval()  # its head is new: there are three tags
    assert model.config.model_type == kind
    assert model.config.id2label == {0: "0", 1: "1", 2: "2"}
    rows = np.arange(len(data.evaluation))
    whole = data.evaluation.batch(rows)
    with torch.no_grad():
        together: Any = task.outputs(model, whole)
        alone: Any = [
            task.outputs(model, data.evaluation.batch(rows[row : row + 1])) for row in rows
        ]
        total = float(task.loss(model, whole))
        mean = model(
            **{name: whole[name] for name in ("input_ids", "attention_mask", "labels")}
        ).loss
    assert (
        together["words"].tolist()
        == data.evaluation.items.tolist()
        == [len(row["tags"]) for row in ROWS]
    )
    assert [row.tolist() for row in together["label"]] == [row["tags"] for row in ROWS]
    assert [row.tolist() for row in together["prediction"]] == [
        one["prediction"][0].tolist() for one in alone
    ]
    assert together["loss"].tolist() == pytest.approx(
        [float(one["loss"]) for one in alone], rel=1e-5
    )
    assert total == pytest.approx(float(together["loss"].sum()), rel=1e-5)
    assert total == pytest.approx(float(mean) * data.evaluation.items.sum(), rel=1e-5)


def test_a_word_is_the_same_at_the_start_of_a_row_and_inside_it(tmp_path: Path) -> None:
    model = saved("roberta", tmp_path)
    tokenizer = load_words_tokenizer(model, Path(model))
    tokens = tokenizer(["Ada", "Ada"], is_split_into_words=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokens) == ["ĠAda", "ĠAda"]
    tokenizer.save_pretrained(tmp_path / "saved")
    exported = load_tokenizer("saved", tmp_path / "saved")
    assert exported(["Ada", "Ada"], is_split_into_words=True)["input_ids"] == tokens


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("vit", "vit does not tag tokens; take a model such as BERT or RoBERTa, or another --task"),
        ("convbert", "convbert lets padding take part in its answers"),
    ],
)
def test_a_model_that_does_not_serve_is_named(kind: str, problem: str, tmp_path: Path) -> None:
    model = Path(saved("bert", tmp_path))
    tree = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(tree | {"model_type": kind}))
    with pytest.raises(ModelError, match=problem):
        task_of(tmp_path, model=str(model)).prepare(RunConfig())


@pytest.mark.parametrize("name", SHAPES)
def test_a_built_in_model_has_its_layers_width_and_tags(name: str) -> None:
    with torch.device("meta"):
        config: Any = build_model(
            TagOptions(model=name), ["B-X", "O"], vocab_size=300, pad=0
        ).config
    assert (config.num_hidden_layers, config.hidden_size) == (
        SHAPES[name].layers,
        SHAPES[name].hidden,
    )
    assert config.label2id == {"B-X": 0, "O": 1}


def with_parts(pre_tokenizer: Any, normalizer: Any) -> Any:
    """A tokenizer of these parts, trained on words: merges of public ones do
    not cross words either.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = [*"▁Ġ", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    special = ["<pad>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    space = " " if pre_tokenizer is not None else ""  # the normalizer of Llama 2 writes one itself
    tokenizer.train_from_iterator(
        [f"{space}{word}" for word in ["a", "the", "9", *WORDS]] * 20, trainer
    )
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


SPLIT = pre_tokenizers.Split(
    Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"
)
PARTS: dict[str, tuple[Any, Any, str]] = {
    "GPT-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, "Ġ"),
    "Llama 3": (
        pre_tokenizers.Sequence(
            [SPLIT, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
        None,
        "Ġ",
    ),
    "DeepSeek": (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        None,
        "Ġ",
    ),
    "Metaspace, never": (pre_tokenizers.Metaspace(prepend_scheme="never"), None, "▁"),
    "Metaspace, first": (pre_tokenizers.Metaspace(prepend_scheme="first"), None, "▁"),
    "Metaspace, always": (pre_tokenizers.Metaspace(prepend_scheme="always"), None, "▁"),
    "XLM-RoBERTa": (
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        None,
        "▁",
    ),
    "Gemma": (
        pre_tokenizers.Split(" ", "merged_with_previous"),
        normalizers.Replace(" ", "▁"),
        "▁",
    ),
    "Llama 2": (
        None,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        "▁",
    ),
    "BERT": (pre_tokenizers.BertPreTokenizer(), None, ""),
}
"""Pre-tokenizer and normalizer of public tokenizers, and what begins a word."""


@pytest.mark.parametrize("form", PARTS)
def test_a_word_has_the_pieces_that_it_has_in_running_text(form: str) -> None:
    pre_tokenizer, normalizer, begins = PARTS[form]
    tokenizer = with_parts(pre_tokenizer, normalizer)
    words = tokenize_words(tokenizer, [["London", "came", "London"]], 64)
    in_text = tokenizer("the London came London", add_special_tokens=False)["input_ids"]
    pieces = words.tokens.values.tolist()
    assert pieces == in_text[-len(pieces) :]
    first = [
        token
        for token, begin in zip(pieces, words.begins.values.tolist(), strict=True)
        if begin >= 0
    ]
    assert len(first) == 3
    assert all(token.startswith(begins) for token in tokenizer.convert_ids_to_tokens(first))
