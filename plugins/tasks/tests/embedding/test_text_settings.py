"""A folder of sentence-transformers says what becomes of a text: its case, its prompt, and
which tokens are pooled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import BertWordPieceTokenizer
from tokenizers.processors import BertProcessing
from torch.nn.functional import normalize
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

from distcore import ConfigError, FileRows, ModelError, RunConfig
from distcore_tasks.embedding import folder_keys as keys
from distcore_tasks.embedding.modules import check_modules
from distcore_tasks.embedding.task import Embedding

TEXTS = ["The Pig Sleeps", "A Red Apple Falls", "Never So Big"]
WORDS = [*TEXTS, "the pig sleeps a red apple falls never so big", "Find Small: Green "]
OWNED = {
    "sentence_bert_config.json": (
        keys.ENCODER_FOLLOWED | keys.ENCODER_WITHOUT_EFFECT | keys.ENCODER_NEUTRAL.keys()
    ),
    "1_Pooling/config.json": keys.POOLING_FOLLOWED | keys.POOLING_WITHOUT_EFFECT,
    "config_sentence_transformers.json": (
        keys.MODEL_FOLLOWED | keys.MODEL_WITHOUT_EFFECT | keys.MODEL_NEUTRAL.keys()
    ),
}
"""Keys of each file that somebody owns; others are refused."""
PROMPTS = {"query": "Find ", "document": "Small: "}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An encoder whose tokenizer tells capital letters apart."""
    words = BertWordPieceTokenizer(lowercase=False)
    words.train_from_iterator(WORDS * 5, vocab_size=200, show_progress=False)
    whole = words._tokenizer
    ends = [(name, whole.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
    whole.post_processor = BertProcessing(*ends)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=whole, **names)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=len(tokenizer), initializer_range=0.3, intermediate_size=48, **sizes
    )
    BertModel(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def say(
    folder: Path, *, lower: bool = False, default: str | None = None, include_prompt: bool = True
) -> None:
    """Write what sentence-transformers reads beside an encoder."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"))
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (path, kind) in enumerate(kinds)
    ]
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_Pooling/config.json": {
            "word_embedding_dimension": 32,
            "pooling_mode_mean_tokens": True,
            "include_prompt": include_prompt,
        },
        "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": lower},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": default},
    }
    for name, tree in files.items():
        (folder / name).write_text(json.dumps(tree))


def by_hand(
    folder: Path, text: str, prompt: str = "", *, lower: bool = False, pools_prompt: bool = True
) -> Any:
    """The embedding that sentence-transformers makes of one text."""
    model: Any = BertModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole = prompt + text
    inputs = tokenizer(whole.lower() if lower else whole, return_tensors="pt")
    pooled = inputs["attention_mask"].clone()
    if not pools_prompt:
        pooled[:, : len(tokenizer(prompt)["input_ids"]) - 1] = 0
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    return normalize((states * pooled[..., None]).sum(1) / pooled.sum(), dim=-1)[0]


def embedded(
    folder: Path, rows: Path, **options: Any
) -> tuple[Embedding, Any, torch.Tensor, torch.Tensor]:
    """Task, data, and the embeddings of anchors of training rows and of texts to predict."""
    rows.write_text(
        "".join(json.dumps({"anchor": text, "positive": text[::-1]}) + "\n" for text in TEXTS)
    )
    task = Embedding(
        model=str(folder), data=str(rows), eval_data=str(rows), max_seq_len=32, **options
    )
    config = RunConfig(global_batch_size=3)
    data: Any = task.prepare(config)
    model = task.build_model(config, data).eval()
    texts: Any = task.unlabeled(
        FileRows(file="new", start=1, records=[(text,) for text in TEXTS]), data
    )
    with torch.no_grad():
        anchors = task.embed(model, data.evaluation.batch(np.arange(3)))["anchor"]
        predicted = task.embed(model, texts.batch(np.arange(3)))["text"]
    return task, data, anchors, predicted


CASES: dict[str, tuple[dict[str, Any], dict[str, str], str, str]] = {
    "says nothing": ({}, {}, "", ""),
    "lower case": ({"lower": True}, {}, "", ""),
    "default prompt": ({"default": "query"}, {}, "Find ", "Find "),
    "lower case and prompt": ({"default": "query", "lower": True}, {}, "Find ", "Find "),
    "prompt not pooled": ({"default": "query", "include_prompt": False}, {}, "Find ", "Find "),
    "prompt by name": ({"default": "query"}, {"text": "document"}, "Find ", "Small: "),
    "no prompt": ({"default": "query"}, {"anchor": "", "text": ""}, "", ""),
    "prompt of the run": ({}, {"anchor": "query", "text": "Green "}, "Find ", "Green "),
}
"""What a folder says, the prompts of a run, and what then is before anchors and
before texts to embed.
"""


@pytest.mark.parametrize("case", CASES)
def test_texts_become_what_their_folder_says_and_an_export_says_it_again(
    case: str, folder: Path, tmp_path: Path
) -> None:
    said, prompts, before_anchor, before_text = CASES[case]
    say(folder, **said)
    how = {"lower": said.get("lower", False), "pools_prompt": said.get("include_prompt", True)}
    task, data, anchors, predicted = embedded(folder, tmp_path / "rows.jsonl", prompts=prompts)
    for text, anchor, one in zip(TEXTS, anchors, predicted, strict=True):
        assert torch.allclose(anchor, by_hand(folder, text, before_anchor, **how), atol=1e-5)
        assert torch.allclose(one, by_hand(folder, text, before_text, **how), atol=1e-5)

    export = tmp_path / "export"
    export.mkdir()
    task.save(export, RunConfig(global_batch_size=3), data)
    BertModel.from_pretrained(folder).save_pretrained(export)
    again = embedded(export, tmp_path / "rows.jsonl")[3]
    assert torch.allclose(again, predicted, atol=1e-6)
    assert (
        json.loads((export / "config_sentence_transformers.json").read_text())["prompts"].items()
        >= PROMPTS.items()
    )


def test_a_run_says_what_its_folder_does_with_texts(folder: Path, tmp_path: Path) -> None:
    say(folder, lower=True, default="query")
    _, data, *_ = embedded(folder, tmp_path / "rows.jsonl")
    assert any("texts become lower case (do_lower_case)" in line for line in data.warnings)
    assert any(
        "'Find ', its default prompt, is put before each anchor and positive" in line
        for line in data.warnings
    )


def test_settings_that_cannot_be_followed_are_one_line(folder: Path) -> None:
    say(folder)
    with pytest.raises(
        ConfigError, match=r"prompts.ancor: is not one of anchor, positive, negative, text"
    ):
        Embedding(model=str(folder), prompts={"ancor": "query"})
    with pytest.raises(
        ModelError, match=r"the model has no prompt 'qurey', but 'query', 'document'; name one"
    ):
        _ = Embedding(model=str(folder), prompts={"anchor": "qurey"}).prompt_texts
    say(folder, default="passage")
    with pytest.raises(
        ModelError, match=r"config_sentence_transformers.json has no prompt 'passage', its default"
    ):
        _ = Embedding(model=str(folder)).text_settings


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("sentence_bert_config.json", "model_args", {"attn_implementation": "eager"}),
        ("sentence_bert_config.json", "processor_kwargs", {"model_max_length": 8}),
        ("sentence_bert_config.json", "query_length", 8),
        ("sentence_bert_config.json", "transformer_task", "fill-mask"),
        ("sentence_bert_config.json", "brought_by_a_new_release", 1),
        ("1_Pooling/config.json", "another", 1),
        ("config_sentence_transformers.json", "similarity_fn_name", "dot"),
        ("config_sentence_transformers.json", "model_type", "SparseEncoder"),
    ],
)
def test_a_key_that_changes_embeddings_and_nobody_follows_is_refused(
    file: str, key: str, value: object, folder: Path
) -> None:
    say(folder)
    tree = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(tree | {key: value}))
    with pytest.raises(
        ModelError, match=rf"model .*: {file}: {key} = .*: this task does not have it; "
    ):
        _ = Embedding(model=str(folder)).text_settings
    (folder / file).write_text(json.dumps(tree | {key: None}))
    _ = Embedding(model=str(folder)).text_settings


def test_every_key_that_sentence_transformers_writes_and_reads_has_an_owner(folder: Path) -> None:
    """Of the release that is installed: a new key is followed, said to be
    without effect, or refused.
    """
    theirs: Any = pytest.importorskip(
        "sentence_transformers", "6", reason="needs sentence-transformers from 6"
    )
    say(folder)
    theirs.SentenceTransformer(str(folder), device="cpu").save(str(folder.parent / "again"))
    files = (
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
    )
    for name in files:
        assert json.loads((folder.parent / "again" / name).read_text()).keys() <= OWNED[name]
    check_modules("m", folder.parent / "again")
    settings = Embedding(model=str(folder.parent / "again")).text_settings
    assert (settings.length, settings.prompts) == (64, PROMPTS)


@pytest.mark.parametrize(
    ("said", "option", "length"),
    [
        ({"max_seq_length": 6}, None, 6),
        ({"max_seq_length": 6}, 9, 9),
        ({"max_seq_length": None}, None, 7),
        ({"do_lower_case": False}, None, 7),
        (None, None, 128),
    ],
)
def test_texts_are_cut_where_their_folder_says(
    said: dict[str, Any] | None, option: int | None, length: int, folder: Path, tmp_path: Path
) -> None:
    """A folder of sentence-transformers that says no length has that of its
    tokenizer or its positions.
    """
    if said is not None:
        say(folder)
        (folder / "sentence_bert_config.json").write_text(json.dumps(said))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 7}))
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"anchor": TEXTS[0] * 9, "positive": "a " * 300}) + "\n") * 3)
    task = Embedding(model=str(folder), data=str(rows), eval_data=str(rows), max_seq_len=option)
    data: Any = task.prepare(RunConfig(global_batch_size=3))
    assert task.length == length
    assert data.evaluation.batch(np.arange(3))["positive"]["input_ids"].shape == (3, length)
    texts: Any = task.unlabeled(FileRows(file="new", start=1, records=[("a " * 300,)]), data)
    assert texts.batch(np.arange(1))["text"]["input_ids"].shape == (1, length)
    is_said = any(
        f"texts have up to {length} tokens, as its folder" in line for line in data.warnings
    )
    assert is_said == (said is not None and option is None)
    (tmp_path / "export").mkdir()
    task.save(tmp_path / "export", RunConfig(global_batch_size=3), data)
    exported = json.loads((tmp_path / "export/sentence_bert_config.json").read_text())
    assert exported["max_seq_length"] == length
