"""Each key of tokenizer_config.json that changes a result has an owner; those that
change tokens are measured.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from distcore.config import RunConfig
from distcore_tasks.text_classification.task import TextClassification

TOKENS = (
    "the tokenizer itself, which is called as it is loaded, and saved whole",
    """add_bos_token add_eos_token add_prefix_space additional_special_tokens added_tokens_decoder
    do_lower_case do_lowercase do_lowercase_and_remove_accent extra_ids extra_special_tokens
    fix_mistral_regex keep_accents legacy legacy_behaviour model_specific_special_tokens
    never_split normalization offset prefix_token middle_token suffix_token eot_token fill_token
    post_processor remove_space split_by_punct split_special_tokens strip_accents
    tokenize_chinese_chars do_basic_tokenize do_word_tokenize do_subword_tokenize
    word_tokenizer_type subword_tokenizer_type mecab_kwargs sudachi_kwargs jumanpp_kwargs
    clean_text do_clean_text wordpieces_prefix chain_break_token _spm_precompiled_charsmap unk_id
    trim_offsets add_blank normalize phonemize is_uroman""",
)
SPECIAL = (
    (
        "the tokenizer's special tokens: padding, end and mask are read from it, the others it"
        " writes itself"
    ),
    """unk_token pad_token eos_token bos_token sep_token cls_token mask_token mask_token_sent
    x_sep_token bod_token eod_token line_token space_token question_token""",
)
FILES = (
    "the files of the tokenizer, which are fetched, copied, and part of the cache's key",
    """vocab merges vocab_file merges_file spm_file src_vocab_file tgt_vocab_file emoji_file
    word_shape_file word_pronunciation_file normalizer_file tokenizer_file gguf_file backend
    tokenizer tokenizer_object files_loaded vocab_size name_or_path question_encoder generator""",
)
DECODE = (
    "decode() of the tokenizer, which makes generated text",
    """clean_up_tokenization_spaces
    clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output errors""",
)
CHAT = (
    "the chat template, which is measured by rendering it",
    "chat_template use_default_system_prompt chat_control_tokens",
)
LENGTH = (
    "--max-seq-len, which is the length of a row whatever the tokenizer says",
    "model_max_length max_len max_length tokenizer_truncation _json_truncation",
)
CUT = (
    "the tokenizer where it cuts texts; causal-lm and preference cut at the end, and say so",
    "truncation_side",
)
PADDING = (
    "the batch, which has a mask: what is padded never counts",
    "padding_side tokenizer_padding _json_padding model_input_names",
)
LANGUAGES = (
    "the languages of a pair of texts",
    "src_lang tgt_lang langs lang2id id2lang target_lang language task predict_timestamps",
)
NO_TEXT = (
    "no task: boxes, tables, entities, markup and sounds are no columns of text",
    """pad_token_label only_label_first_subword sep_token_box pad_token_box cls_token_box
    entity_vocab max_entity_length max_mention_length entity_1_token entity_2_token
    entity_unk_token entity_pad_token entity_mask_token entity_mask2_token tags_dict max_depth
    max_width pad_width empty_token cell_trim_length max_column_id max_row_id strip_column_names
    update_answer_coordinates min_question_length max_question_length word_delimiter_token
    replace_word_delimiter_char phone_delimiter_token do_phonemize phonemizer_lang
    phonemizer_backend""",
)
NOTHING = (
    "nothing: no token follows from it",
    "verbose processor_class response_schema response_template",
)
GROUPS = (TOKENS, SPECIAL, FILES, DECODE, CHAT, LENGTH, CUT, PADDING, LANGUAGES, NO_TEXT, NOTHING)
OWNERS = {key: owner for owner, keys in GROUPS for key in keys.split()}


def parameters(kind: type) -> set[str]:
    """The names that the classes of a tokenizer take from tokenizer_config.json."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in vars(base) and base is not object:
            given = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
            names |= {
                one.name
                for one in given
                if one.kind is not one.VAR_KEYWORD and one.kind is not one.VAR_POSITIONAL
            }
    return names - {"self"}


def test_every_key_of_every_tokenizer_has_an_owner() -> None:
    assert sum(len(keys.split()) for _, keys in GROUPS) == len(OWNERS)
    left: dict[str, set[str]] = {}
    classes = {
        name
        for name in TOKENIZER_MAPPING_NAMES.values()
        if isinstance(name, str) and hasattr(transformers, name)
    }
    for name in sorted(classes):
        try:
            kind: Any = tokenizer_class_from_name(name)
        except ImportError:  # of a library that is not here
            continue
        if others := parameters(kind) - OWNERS.keys():
            left[name] = others
    assert len(classes) > 50
    assert not left


def test_every_key_that_all_tokenizers_read_has_an_owner() -> None:
    source = "".join(
        inspect.getsource(kind.__init__)
        for kind in (PreTrainedTokenizerBase, PreTrainedTokenizerFast)
    )
    read = set(re.findall(r'kwargs\.(?:pop|get)\(\s*"([^"]+)"', source))
    assert len(read) > 10
    assert not read - OWNERS.keys()


WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "The",
    "pig",
    "cafe",
    "café",
    "a",
    "b",
    "c",
    "d",
    "豚",
    "小",
    "小豚",
]
LINES = ["The pig", "the café", "小豚 a", "a [MASK] b", "a b c d a b c d a b c d"] * 4


def wordpiece(folder: Path) -> None:
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))


def byte_pairs(folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "[MASK]"]
    vocabulary = {piece: at for at, piece in enumerate([*special, *sorted(ByteLevel.alphabet())])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")


CHANGES: list[tuple[str, str, str, object]] = [
    ("BertTokenizer", "bert", "do_lower_case", False),
    ("BertTokenizer", "bert", "strip_accents", False),
    ("BertTokenizer", "bert", "tokenize_chinese_chars", False),
    ("BertTokenizer", "bert", "truncation_side", "left"),
    ("BertTokenizer", "bert", "split_special_tokens", True),
    ("BertTokenizer", "bert", "additional_special_tokens", ["he"]),
    ("RobertaTokenizer", "roberta", "add_prefix_space", True),
    ("RobertaTokenizer", "roberta", "truncation_side", "left"),
    ("RobertaTokenizer", "roberta", "mask_token", "[MASK]"),
]


@pytest.mark.parametrize(
    ("name", "kind", "key", "value"), CHANGES, ids=[f"{name}-{key}" for name, _, key, _ in CHANGES]
)
def test_a_key_that_changes_tokens_is_honored_and_saved(
    name: str, kind: str, key: str, value: object, tmp_path: Path
) -> None:
    rows = [{"text": text, "label": "ab"[number % 2]} for number, text in enumerate(LINES)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens: list[list[list[int]]] = []
    for number, settings in enumerate(({}, {key: value})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (wordpiece if kind == "bert" else byte_pairs)(folder)
        shape: Any = AutoConfig.for_model(kind, vocab_size=2000)
        (folder / "config.json").write_text(json.dumps(shape.to_dict()))
        (folder / "model.safetensors").touch()
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": name, **settings})
        )
        file = str(tmp_path / "rows.jsonl")
        task = TextClassification(model=str(folder), data=file, eval_data=file, max_seq_len=8)
        data: Any = task.prepare(RunConfig())
        batch = data.evaluation.batch(np.arange(len(rows)))
        lengths = batch["attention_mask"].sum(1).tolist()
        made = [
            row[:length].tolist() for row, length in zip(batch["input_ids"], lengths, strict=True)
        ]
        task.save(tmp_path / f"saved-{number}", RunConfig(), data)
        saved = tmp_path / f"saved-{number}"
        (saved / "config.json").write_text((folder / "config.json").read_text())
        for loaded in (AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(saved)):
            assert made == loaded(LINES, truncation=True, max_length=8)["input_ids"]
        tokens.append(made)
    assert tokens[0] != tokens[1]
