import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from label_cases import LabeledTexts, labels_of, source_rows
from row_cases import all_of

from distcore.config import RunConfig
from distcore.errors import DataError
from distcore_data.cache import cached_folder
from distcore_tasks.rows import building
from distcore_tasks.rows.dataset import row_dataset
from distcore_tasks.rows.pipeline import TokenizerInfo
from distcore_tasks.rows.table import CachedTable
from distcore_tasks.shared.classification.labels import distinct_labels, known_labels
from distcore_tasks.shared.jagged import flat_of
from distcore_tasks.shared.splits import split_rows
from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece
from distcore_tasks.text_classification.datasets import prepare_text
from distcore_tasks.text_classification.options import TextOptions
from distcore_tasks.text_classification.rows import LabeledRows

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


@pytest.fixture
def options(tmp_path):
    rows = [
        [" ".join(WORDS[row % 5 : row % 5 + 1 + row % 3]) + f" {row}", row % 3] for row in range(60)
    ]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    return TextOptions(data=str(tmp_path / "data.json"), model="bert-tiny", max_seq_len=16)


def dataset_of(columns, pad=0, type_pad=0, left=False):
    """Rows in memory."""
    info = TokenizerInfo(pad, {"type_pad": np.array(type_pad), "pads_left": np.array(left)})
    return row_dataset(LabeledRows(TextOptions()), CachedTable(columns), info)


@pytest.fixture
def dataset():
    tokens = np.array([2, 5, 3, 2, 6, 7, 8, 3, 2, 3], np.int32)
    tokens_of_rows = flat_of(tokens, np.array([3, 5, 2]))
    return dataset_of({"tokens": tokens_of_rows, "labels": np.array([1, 0, 2])})


def test_a_batch_is_padded_to_its_longest_row_in_the_order_asked(dataset):
    batch = dataset.batch(np.array([2, 0]))
    assert batch["input_ids"].tolist() == [[2, 3, 0], [2, 5, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [2, 1]
    assert {str(tensor.dtype) for tensor in batch.values()} == {"torch.int64"}


@pytest.mark.parametrize("left", [True, False])
def test_types_are_padded_on_the_side_of_the_tokens_with_what_the_tokenizer_says(left):
    lengths = np.array([2, 3])
    tokens = flat_of(np.array([5, 6, 7, 8, 9], np.int32), lengths)
    types = flat_of(np.array([0, 1, 0, 1, 1], np.int8), lengths)
    columns = {"tokens": tokens, "types": types, "labels": np.array([0, 1])}
    batch = dataset_of(columns, pad=1, type_pad=3, left=left).batch(np.array([1, 0]))
    assert batch["input_ids"].tolist() == [[7, 8, 9], [1, 5, 6] if left else [5, 6, 1]]
    assert batch["token_type_ids"].tolist() == [[0, 1, 1], [3, 0, 1] if left else [0, 1, 3]]


def test_a_batch_may_repeat_rows_and_may_be_empty(dataset):
    assert dataset.batch(np.array([1, 1]))["input_ids"].tolist() == [[2, 6, 7, 8, 3]] * 2
    assert dataset.batch(np.array([], np.int64))["input_ids"].shape == (0, 0)


def test_a_dataset_knows_lengths_and_items(dataset):
    assert (len(dataset), dataset.lengths.tolist(), dataset.items.tolist()) == (
        3,
        [3, 5, 2],
        [1, 1, 1],
    )


def test_a_batch_of_32_rows_is_collated_in_microseconds():
    lengths = np.random.default_rng(0).integers(5, 40, 1000)
    tokens = flat_of(np.ones(lengths.sum(), np.int32), lengths)
    dataset = dataset_of({"tokens": tokens, "labels": lengths % 3})
    rows = np.arange(0, 1000, 31)[:32]
    dataset.batch(rows)
    best = min(_seconds(lambda: dataset.batch(rows)) for _ in range(200))
    assert best < 200e-6  # some 20 µs on an idle machine


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def prepared(options: TextOptions, seed: int = 0) -> Any:
    """The prepared data; of its parts the tests read what only tokens of text have."""
    return prepare_text(options, RunConfig(seed=seed))


def test_every_row_is_in_exactly_one_part_with_its_own_tokens_and_label(options):
    data = prepared(options)
    rows = np.concatenate([source_rows(data.train), source_rows(data.evaluation)])
    assert sorted(rows) == list(range(60))
    assert len(data.evaluation) == 6
    assert all(
        np.array_equal(labels_of(part), source_rows(part) % 3)
        for part in (data.train, data.evaluation)
    )
    assert np.array_equal(
        data.evaluation.lengths >= 3 + source_rows(data.evaluation) % 3, np.ones(6, bool)
    )


def test_the_split_follows_the_seed_and_not_the_call(options):
    first, again = prepared(options), prepared(options)
    other = prepared(options, seed=1)
    assert np.array_equal(source_rows(first.evaluation), source_rows(again.evaluation))
    assert not np.array_equal(source_rows(first.evaluation), source_rows(other.evaluation))


def test_a_tiny_fraction_still_keeps_one_row_and_every_class_stays_in_training():
    labels = np.array([0, 0, 0, 1, 2])
    for seed in range(20):
        train, kept = split_rows("x", len(labels), 0.01, seed, labels)
        assert (len(train), len(kept)) == (4, 1)
        assert set(labels[train]) == {0, 1, 2}


def test_rows_that_are_all_alone_in_their_class_cannot_be_split():
    with pytest.raises(
        DataError, match=r"x: each of the 3 rows is the only one of its class.*--eval-data"
    ):
        split_rows("x", 3, 0.5, 0, np.array([0, 1, 2]))


def test_a_data_file_with_one_class_is_refused():
    with pytest.raises(
        DataError, match="x: all 2 rows have the label 'a': a classifier needs at least 2 classes"
    ):
        distinct_labels(LabeledTexts("x", ["t", "u"], ["a", "a"]))


def test_integer_classes_sort_as_numbers():
    assert distinct_labels(LabeledTexts("x", ["t"] * 3, [10, 9, 1])) == [1, 9, 10]


def test_a_label_that_training_lacks_is_refused_with_its_row():
    with pytest.raises(
        DataError,
        match="x, row 2: label 7 is out of range: no training row has it; training has: 0, 1",
    ):
        known_labels(LabeledTexts("x", ["t", "u"], [1, 7]), ["0", "1"])


def test_files_for_evaluation_and_test_override_the_split(options, tmp_path):
    (tmp_path / "eval.csv").write_text("text,label\nalpha,2\nbeta,0\n")
    (tmp_path / "test.jsonl").write_text('["gamma", 1]\n')
    files = {"eval_data": str(tmp_path / "eval.csv"), "test_data": str(tmp_path / "test.jsonl")}
    data = prepared(replace(options, **files))
    assert (len(data.train), len(data.evaluation), len(data.test)) == (60, 2, 1)
    assert (labels_of(data.evaluation).tolist(), labels_of(data.test).tolist()) == ([2, 0], [1])


def test_without_a_test_file_the_evaluation_rows_are_the_test(options):
    data = prepared(options)
    assert data.test is data.evaluation


def test_a_second_preparation_neither_parses_nor_tokenizes(options, monkeypatch):
    first = prepared(options)
    monkeypatch.setattr(building, "open_source", None)
    monkeypatch.setattr(building, "labeled_parts", None)
    monkeypatch.setattr(LabeledRows, "encode", None)
    second = prepared(options)
    assert np.array_equal(all_of(first.train, "tokens"), all_of(second.train, "tokens"))
    assert first.facts == second.facts


@pytest.mark.programs
def test_a_warm_preparation_imports_neither_torch_nor_transformers(options):
    prepared(options)
    code = (
        "import sys; from distcore import RunConfig;from"
        " distcore_tasks.text_classification.options import TextOptions;from"
        " distcore_tasks.text_classification.datasets import"
        f" prepare_text;prepare_text(TextOptions(data={options.data!r}, model='bert-tiny',"
        " max_seq_len=16), RunConfig());print([name for name in ('torch', 'transformers',"
        " 'tokenizers', 'sklearn', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("change", [{"max_seq_len": 4}, {"eval_fraction": 0.5}], ids=str)
def test_an_option_that_changes_tokens_changes_the_cache_entry(options, cache, change):
    prepared(options)
    prepared(replace(options, **change))
    prepared(options, seed=3)
    assert len(list((cache / "tokens").glob("*/manifest.json"))) == 3


def test_content_names_the_entry_not_the_file_name(options, cache, tmp_path):
    prepared(options)
    copy = tmp_path / "copy.json"
    copy.write_bytes(Path(options.data).read_bytes())
    assert prepared(replace(options, data=str(copy))).facts["data"] == str(copy)
    assert len(list((cache / "tokens").glob("*/manifest.json"))) == 1


def test_long_rows_are_cut(options):
    assert prepared(replace(options, max_seq_len=4)).train.lengths.max() == 4


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_entry_is_rebuilt(options, cache, damage):
    before = all_of(prepared(options).train, "tokens")
    (tokens,) = cache.glob("tokens/*/train/tokens.npy")
    content = bytearray(tokens.read_bytes())
    content[-1] ^= 1
    actions = {
        "flip": lambda: tokens.write_bytes(content),
        "cut": lambda: tokens.write_bytes(content[:-8]),
        "remove": tokens.unlink,
        "manifest": lambda: (tokens.parents[1] / "manifest.json").write_text("{"),
    }
    actions[damage]()
    assert np.array_equal(all_of(prepared(options).train, "tokens"), before)


def test_a_failed_build_leaves_nothing_behind(cache):
    def build(folder):
        (folder / "half").write_text("x")
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        cached_folder("kind", "key", build)
    assert [path.name for path in (cache / "kind").iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        DataError, match=r"^cache folder .*file: Not a directory; set DISTCORE_CACHE"
    ):
        cached_folder("kind", "key", lambda folder: None)


@pytest.mark.programs
def test_four_processes_at_once_build_once(cache):
    code = (
        "import os, time; from pathlib import Path; from distcore_data.cache import cached_folder\n"
        "def build(folder):\n"
        "    time.sleep(0.5)\n"
        "    (folder / 'builder').write_text(str(os.getpid()))\n"
        "print((cached_folder('kind', 'key', build) / 'builder').read_text())\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    answers = {rank.communicate(timeout=60)[0].strip() for rank in ranks}
    assert len(answers) == 1
    assert answers <= {str(rank.pid) for rank in ranks}


def test_an_unknown_name_that_is_no_file_names_the_embedded_data(options):
    with pytest.raises(
        DataError,
        match=r"data 'stdlib-doc': neither a file .*mean 'stdlib-docs'\?\) \(embedded: stdl",
    ):
        prepared(replace(options, data="stdlib-doc"))


def test_a_missing_file_is_named(options):
    with pytest.raises(DataError, match=r"data file missing/a\.json: no such file"):
        prepared(replace(options, data="missing/a.json"))


def test_chinese_is_split_by_character():
    tokenizer = as_transformers(train_wordpiece(["银色高跟鞋 shoes", "高跟 shoes"], 100))
    assert tokenizer.tokenize("高跟鞋 Shoes") == ["高", "跟", "鞋", "shoes"]


def test_a_vocabulary_keeps_to_its_size_and_starts_with_the_special_tokens():
    tokenizer = train_wordpiece([" ".join(WORDS)] * 3, 64)
    assert tokenizer.get_vocab_size() <= 64
    assert tokenizer.token_to_id("[PAD]") == 0
    assert tokenizer.encode("alpha").tokens[0] == "[CLS]"


@pytest.mark.programs
def test_a_trained_tokenizer_is_the_same_in_every_process(options, tmp_path):
    texts = [f"{first}{second} {second}" for first in WORDS for second in WORDS]
    code = (
        "import json, sys; from distcore_tasks.shared.wordpiece import train_wordpiece;"
        "print(train_wordpiece(json.loads(sys.argv[1]), 120).to_str())"
    )
    answers = {
        subprocess.check_output(
            [sys.executable, "-c", code, json.dumps(texts)], env=os.environ | {"PYTHONHASHSEED": s}
        )
        for s in ("1", "2", "3")
    }
    assert len(answers) == 1
