"""Tokenizers whose files have other names than usual, or none: prepared, opened in a
run folder, and exported.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from distcore.config import RunConfig
from distcore.errors import ModelError
from distcore_tasks.seq2seq.task import Seq2Seq
from distcore_tasks.shared.pretrained import DESCRIPTIONS, tokenizer_digest
from distcore_tasks.text_classification.task import TextClassification

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = [f"the {word} sleeps" for word in ("pig", "cat", "dog", "cow", "hen", "ox")] * 3
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def pieces(folder: Path) -> None:
    """A vocabulary of letters and the codes that join none of them, of fastBPE."""
    (folder / "vocab.txt").write_text(
        "".join(f"{piece} 1\n" for letter in LETTERS for piece in (letter, letter + "@@"))
    )
    (folder / "bpe.codes").write_text("z q 1\n")


def fsmt(folder: Path) -> None:
    pytest.importorskip("sacremoses")
    known = ["<s>", "<pad>", "</s>", "<unk>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    for side in ("src", "tgt"):
        vocabulary = {piece: number for number, piece in enumerate(known)}
        (folder / f"vocab-{side}.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("z q 1\n")


def sentencepiece(*names: str) -> Callable[[Path], None]:
    """Models of SentencePiece by these names."""

    def write(folder: Path) -> None:
        trainer: Any = pytest.importorskip("sentencepiece").SentencePieceTrainer
        for name in names:
            trainer.train(
                sentence_iterator=iter(TEXTS), model_prefix=str(folder / "pieces"), vocab_size=60,
                hard_vocab_limit=False, minloglevel=2, pad_id=-1, bos_id=-1, eos_id=0, unk_id=1,
            )  # fmt: skip
            (folder / "pieces.model").rename(folder / name)
        lines = (folder / "pieces.vocab").read_text().splitlines()
        (folder / "pieces.vocab").unlink()
        known = [line.split("\t")[0] for line in lines]
        if "source.spm" in names:
            (folder / "vocab.json").write_text(
                json.dumps({piece: at for at, piece in enumerate([*known, "<pad>"])})
            )
        if "sentencepiece.bpe.model" in names:
            (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in known[2:]))

    return write


def nothing(folder: Path) -> None:
    """No vocabulary: the tokens are bytes or characters."""


FOLDERS: dict[str, tuple[str, dict[str, Any], Callable[[Path], None]]] = {
    "PhobertTokenizer": ("roberta", {}, pieces),
    "BertweetTokenizer": ("roberta", {}, pieces),
    "CanineTokenizer": ("canine", {}, nothing),
    "ByT5Tokenizer": ("t5", {}, nothing),
    "FSMTTokenizer": ("fsmt", {"langs": ["en", "de"]}, fsmt),
    "MarianTokenizer": (
        "marian",
        {"source_lang": "en", "target_lang": "de"},
        sentencepiece("source.spm", "target.spm"),
    ),
    "BartphoTokenizer": ("mbart", {}, sentencepiece("sentencepiece.bpe.model")),
    "DebertaV2Tokenizer": ("deberta-v2", {}, sentencepiece("spm.model")),
}  # fmt: skip
"""A class of tokenizers, the type of its model, its settings, and what writes its files."""


def folder_of(name: str, folder: Path) -> str:
    """A model folder as it is on the hub; no test builds its model."""
    kind, settings, write = FOLDERS[name]
    folder.mkdir()
    write(folder)
    shape: Any = AutoConfig.for_model(
        kind, **({} if kind in ("fsmt", "marian", "t5", "mbart") else SMALL)
    )
    (folder / "config.json").write_text(
        json.dumps(shape.to_dict() | {"vocab_size": 2000, "decoder_start_token_id": 0})
    )
    (folder / "model.safetensors").touch()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, **settings}))
    return str(folder)


def test_canine_has_a_tokenizer_without_files_and_is_refused_for_its_padding(
    tmp_path: Path,
) -> None:
    task = TextClassification(
        model=folder_of("CanineTokenizer", tmp_path / "model"), max_seq_len=32
    )
    assert task.model_folder() == tmp_path / "model"
    with pytest.raises(ModelError, match="canine lets padding take part in its answers"):
        task.prepare(RunConfig())


@pytest.mark.parametrize("name", [name for name in FOLDERS if name != "CanineTokenizer"])
def test_the_files_that_transformers_loads_are_in_the_run_folder_and_in_an_export(
    name: str, tmp_path: Path
) -> None:
    model = folder_of(name, tmp_path / "model")
    expected = AutoTokenizer.from_pretrained(model)("the pig sleeps")["input_ids"]
    assert len({*expected}) > 3
    key = "text" if FOLDERS[name][0] in ("roberta", "deberta-v2") else "source"
    rows = [{key: text, "label": text[4], "target": text} for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind: Any = TextClassification if key == "text" else Seq2Seq
    task = kind(model=model, data=str(tmp_path / "rows.jsonl"), max_seq_len=32)
    data = task.prepare(RunConfig())
    task.save(tmp_path / "run", RunConfig(), data)
    (tmp_path / "run/report.json").write_text("{}")
    (tmp_path / "run/notes.txt").write_text("mine")
    reopened = task.reopen(tmp_path / "run", RunConfig())
    task.save(tmp_path / "export", RunConfig(), reopened)
    for folder in ("run", "export"):
        shutil.copy(Path(model, "config.json"), tmp_path / folder)
        loaded = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert loaded("the pig sleeps")["input_ids"] == expected
        assert type(loaded).__name__ == type(AutoTokenizer.from_pretrained(model)).__name__
    assert not {"report.json", "notes.txt"} & {*os.listdir(tmp_path / "export")}


@pytest.mark.parametrize(
    "name", ["PhobertTokenizer", "FSMTTokenizer", "MarianTokenizer", "DebertaV2Tokenizer"]
)
def test_the_cache_sees_a_change_of_each_file(name: str, tmp_path: Path) -> None:
    folder = Path(folder_of(name, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tools.jinja").write_text("{{ tools }}")
    digests = [tokenizer_digest(folder)]
    for file in sorted(
        file for file in folder.rglob("*") if file.is_file() and file.suffix != ".safetensors"
    ):
        file.write_bytes(file.read_bytes() + b"\n")
        digests.append(tokenizer_digest(folder))
    assert len({*map(str, digests)}) == len(digests) > 5


def test_weights_and_pages_are_not_read_for_the_cache(tmp_path: Path) -> None:
    folder = Path(folder_of("PhobertTokenizer", tmp_path / "model"))
    digest = tokenizer_digest(folder)
    for name in (
        "README.md",
        "model.safetensors.index.json",
        "generation_config.json",
        "pytorch_model.bin",
    ):
        (folder / name).write_text("{}")
    assert tokenizer_digest(folder) == digest


@pytest.mark.parametrize("name", ["BertTokenizer", "Qwen2Tokenizer", "T5Tokenizer"])
def test_a_folder_without_its_vocabulary_has_no_tokenizer(name: str, tmp_path: Path) -> None:
    model = folder_of("CanineTokenizer", tmp_path / "model")
    Path(model, "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    with pytest.raises(ModelError, match=r"the folder has no tokenizer \(any of tokenizer\.json"):
        TextClassification(model=model).model_folder()


def test_every_file_of_every_tokenizer_of_transformers_is_fetched_and_read_for_the_cache() -> None:
    names = {
        name
        for name in TOKENIZER_MAPPING_NAMES.values()
        if isinstance(name, str) and hasattr(transformers, name)
    }
    left: dict[str, list[str]] = {}
    for name in sorted(names):
        try:
            loaded: Any = tokenizer_class_from_name(name)
            files = getattr(loaded, "vocab_files_names", {}).values()
        except ImportError:  # of a library that is not here
            continue
        if others := [
            file for file in files if not any(fnmatch(file, pattern) for pattern in DESCRIPTIONS)
        ]:
            left[name] = others
    assert len(names) > 50
    assert not left
