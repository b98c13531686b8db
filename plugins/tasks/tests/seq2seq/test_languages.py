"""Multilingual models: targets are what the tokenizer makes of them, and texts begin as
targets do in training.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from distcore.config import RunConfig
from distcore.errors import ConfigError, ModelError
from distcore_tasks.causal_lm.vocabulary import train_tokenizer
from distcore_tasks.seq2seq.models import check_capacity
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared.jagged import IGNORED

ROWS = [
    (f"the cow {'eats ' * (row % 3)}{row}", f"{row} grass{' of it' * (row % 2)}")
    for row in range(8)
]
TEXTS = [text for row in ROWS for text in row]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SIZES: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
KINDS: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "mbart": ("MBart", "MBart", {}, "de_DE", "ro_RO"),
    "mbart-50": ("MBart50", "MBart", {"decoder_start_token_id": 2}, "de_DE", "ro_RO"),
    "nllb": ("Nllb", "M2M100", {"decoder_start_token_id": 2}, "deu_Latn", "fra_Latn"),
    "m2m100": ("M2M100", "M2M100", {"decoder_start_token_id": 2}, "de", "fr"),
    "plbart": ("PLBart", "PLBart", {}, "__java__", "__en_XX__"),
}
"""Tokenizer, model and settings of each kind, and the languages of its runs."""


def of_sentencepiece(kind: Any, folder: Path, **languages: str) -> Any:
    """A tokenizer that computes with SentencePiece itself, whose files stay in ``folder``."""
    trainer: Any = pytest.importorskip("sentencepiece").SentencePieceTrainer
    trainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(folder / "pieces"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    files = [str(folder / "pieces.model")]
    if kind is transformers.M2M100Tokenizer:
        pieces = [
            line.split("\t")[0] for line in (folder / "pieces.vocab").read_text().splitlines()
        ]
        numbers = {piece: number for number, piece in enumerate(dict.fromkeys([*SPECIAL, *pieces]))}
        (folder / "numbers.json").write_text(json.dumps(numbers))
        files.insert(0, str(folder / "numbers.json"))
    return kind(*files, **languages)


def tokenizer_of(name: str, folder: Path, **languages: str) -> Any:
    kind = getattr(transformers, f"{name}Tokenizer")
    if name in ("M2M100", "PLBart"):
        return of_sentencepiece(kind, folder, **languages)
    if name == "Nllb":
        pieces = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer: Any = trainers.BpeTrainer(
            vocab_size=120, special_tokens=SPECIAL, show_progress=False
        )
    else:
        pieces = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=60, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.train_from_iterator(TEXTS, trainer)
    model = json.loads(pieces.to_str())["model"]
    if name == "Nllb":
        return kind(
            vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]], **languages
        )
    return kind(vocab=[tuple(piece) for piece in model["vocab"]], **languages)


def folder_of(kind: str, folder: Path, **languages: str) -> str:
    """A folder as the hub has it: its tokenizer says no languages, if none are given."""
    tokenizer_name, model_name, settings, _, _ = KINDS[kind]
    tokenizer = tokenizer_of(tokenizer_name, folder, **languages)
    torch.manual_seed(0)
    config = getattr(transformers, f"{model_name}Config")(
        **SIZES, **settings, vocab_size=len(tokenizer) + 120
    )
    model: Any = AutoModelForSeq2SeqLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


def task_of(folder: Path, **options: Any) -> Seq2Seq:
    file = folder / "rows.json"
    file.write_text(json.dumps(ROWS))
    few: dict[str, Any] = {
        "data": str(file),
        "eval_data": str(file),
        "dropout": 0.0,
        "max_seq_len": 32,
    }
    return Seq2Seq(**(few | options))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_its_export_write_in_the_languages_that_are_named(
    kind: str, tmp_path: Path
) -> None:
    *_, source, target = KINDS[kind]
    name = folder_of(kind, tmp_path)
    task = task_of(tmp_path, model=name, source_lang=source, target_lang=target)
    data: Any = task.prepare(RunConfig())
    model: Any = task.build_model(RunConfig(), data).eval()
    right = AutoTokenizer.from_pretrained(name, src_lang=source, tgt_lang=target)
    reference: Any = AutoModelForSeq2SeqLM.from_pretrained(name).eval()
    expected, rows = 0.0, []
    for row, (text, written) in enumerate(ROWS):
        inputs = right(text, return_tensors="pt")
        labels = right(text_target=written, return_tensors="pt")["input_ids"]
        batch = data.evaluation.batch(np.array([row]))
        assert batch["input_ids"].tolist() == inputs["input_ids"].tolist()
        assert batch["labels"].tolist() == labels.tolist()
        with torch.no_grad():
            logits = reference(**inputs, labels=labels).logits[0]
        expected += float(cross_entropy(logits, labels[0], reduction="sum"))
        rows.append((inputs, labels))
    batch = data.evaluation.batch(np.arange(len(ROWS)))
    with torch.no_grad():
        assert float(task.loss(model, batch)) == pytest.approx(expected, rel=1e-5)
    assert not [line for line in data.warnings if "-lang" in line]

    # A text begins with the tokens that stand before it in training, here and in an export.
    start = rows[0][1][0, -1] if "bart" in kind else model.config.decoder_start_token_id
    code = right.convert_tokens_to_ids(f"__{target}__" if kind == "m2m100" else target)
    model.save_pretrained(tmp_path / "export")
    task.save(tmp_path / "export", RunConfig(), data)
    exported: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == (source, target)
    written = exported.generate(**tokenizer(ROWS[0][0], return_tensors="pt"), max_new_tokens=5)[
        0
    ].tolist()
    assert written[0] == int(start)
    assert code in written[:2]
    asked = replace(task, max_new_tokens=5)
    here: Any = asked.generate(model, data.evaluation.batch(np.array([0])), False)
    ended = written[1 : written.index(2, 1) if 2 in written[1:] else None]
    assert here["generated"].values.tolist() == ended


@pytest.mark.parametrize(
    ("kind", "languages", "taken"),
    [
        ("nllb", {}, "sources are in eng_Latn, targets in eng_Latn"),
        (
            "mbart",
            {"src_lang": "en_XX", "tgt_lang": "ro_RO"},
            "sources are in en_XX, targets in ro_RO",
        ),
    ],
)
def test_a_folder_without_a_choice_says_which_it_takes(
    kind: str, languages: dict[str, str], taken: str, tmp_path: Path
) -> None:
    task = task_of(tmp_path, model=folder_of(kind, tmp_path, **languages))
    for _ in range(2):  # prepared, and from the cache
        assert [line for line in task.prepare(RunConfig()).warnings if taken in line]


def test_the_language_that_a_generation_config_forces_is_that_of_targets(tmp_path: Path) -> None:
    """As mbart-large-50-many-to-one has it: its tokenizer names no target."""
    name = folder_of("mbart-50", tmp_path)
    file = Path(name) / "generation_config.json"
    code = AutoTokenizer.from_pretrained(name).convert_tokens_to_ids("fr_XX")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"forced_bos_token_id": code}))
    data: Any = task_of(tmp_path, model=name).prepare(RunConfig())
    assert data.evaluation.batch(np.array([0]))["labels"][0, 0] == code


def test_languages_that_a_tokenizer_does_not_have_are_refused(tmp_path: Path) -> None:
    name = folder_of("nllb", tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"target_lang = 'fra_latn': model .*did you mean 'fra_Latn'.*--target-lang",
    ):
        task_of(tmp_path, model=name, target_lang="fra_latn").prepare(RunConfig())
    train_tokenizer(TEXTS, 300).save_pretrained(tmp_path / "bart")
    config = transformers.BartConfig(**SIZES, vocab_size=300)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "bart")
    with pytest.raises(
        ConfigError, match=r"source_lang = 'de': the tokenizer of model .* has no languages; leave"
    ):
        task_of(tmp_path, model=str(tmp_path / "bart"), source_lang="de").prepare(RunConfig())


def test_padding_is_no_label(tmp_path: Path) -> None:
    data: Any = task_of(tmp_path, model=folder_of("mbart", tmp_path)).prepare(RunConfig())
    labels = data.evaluation.batch(np.arange(4))["labels"]
    assert (labels == IGNORED).any()
    assert not (labels == 1).any()


def test_experts_that_leave_out_tokens_of_a_micro_batch_are_refused(tmp_path: Path) -> None:
    def folder(**settings: Any) -> Seq2Seq:
        config = transformers.NllbMoeConfig(**SIZES, vocab_size=300, num_experts=2, **settings)
        config.save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").touch()
        (tmp_path / "tokenizer.json").touch()
        return task_of(tmp_path, model=str(tmp_path))

    remedy = (
        "set expert_capacity to 256, the tokens of a global batch, or more, and moe_eval.* to -1"
    )
    for settings in ({}, {"expert_capacity": 256}, {"moe_eval_capacity_token_fraction": -1.0}):
        with pytest.raises(
            ModelError, match=rf"config.json: expert_capacity = .*its rows; {remedy}"
        ):
            check_capacity(folder(**settings) if settings else folder(), 4)
    check_capacity(folder(expert_capacity=256, moe_eval_capacity_token_fraction=-1.0), 4)
