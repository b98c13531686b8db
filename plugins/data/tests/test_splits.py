"""Folders of save_to_disk and names of the hub: which rows they are, and the line for those
that cannot be read.
"""

from __future__ import annotations

import json
import shutil
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from arrow_cases import datasets, save, texts

from distcore import DataError
from distcore.files import absolute
from distcore_data.files import read_records, source_digest, source_name
from distcore_data.splits import Split, find_split

COLUMNS = {"columns.text": "text"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def split(source: str) -> Split:
    part = find_split(source)
    assert part is not None
    return part


def rows(source: str, **columns: str) -> list[tuple[object, ...]]:
    return list(read_records(split(source), columns or COLUMNS))


def test_a_folder_is_one_dataset_or_several_splits_of_which_train_is_the_first(here: Path) -> None:
    save(here / "one", texts(5), shards=2)
    save(here / "several", texts(5), shards=3, validation=texts(2, "other"))
    assert (
        rows("one")
        == rows("several")
        == rows(f"{here}/several@train")
        == [(f"row {n}",) for n in range(5)]
    )
    assert rows("several@validation") == [("other 0",), ("other 1",)]
    assert [source_name(split(source)) for source in ("one", "several")] == [
        "dataset one",
        "dataset several@train",
    ]
    assert len(split("one").files) == 2


def test_the_only_split_needs_no_name(here: Path) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_list(texts(1))}).save_to_disk(here / "only")
    assert str(split("only")) == "only@test"


def test_a_folder_needs_no_library_but_pyarrow(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(here / "one", texts(2))
    # Python's own way to say that it cannot be imported
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert rows("one") == [("row 0",), ("row 1",)]


def test_chosen_rows_in_another_order_are_saved_and_read_so(here: Path) -> None:
    chosen = datasets.Dataset.from_list(texts(9)).select([7, 1, 4]).with_format("numpy", columns=[])
    chosen.save_to_disk(here / "chosen")
    assert rows("chosen") == [("row 7",), ("row 1",), ("row 4",)]


def test_a_class_has_its_name_and_minus_one_is_no_label(here: Path) -> None:
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"])
    )
    labeled = [row | {"label": label} for row, label in zip(texts(3), (1, -1, 0), strict=True)]
    save(here / "classes", labeled, features)
    columns = {"columns.label": "label", "columns.text": "text"}
    assert rows("classes", **columns) == [("yes", "row 0"), (None, "row 1"), ("no", "row 2")]


def test_a_digest_is_of_the_content_wherever_it_is(here: Path) -> None:
    save(here / "one", texts(3), validation=texts(2))
    shutil.copytree(here / "one", here / "copy")
    save(here / "other", texts(3, "Row"))
    assert (
        source_digest(split("one"))
        == source_digest(split(f"{here}/copy@train"))
        != source_digest(split("one@validation"))
    )
    assert source_digest(split("other")) != source_digest(split("one"))


def test_a_large_dataset_has_some_rows_in_memory(here: Path) -> None:
    text, size = "word " * 50, 20_000 * 250
    save(here / "large", [{"text": f"{text}{number}"} for number in range(20_000)])
    large, before, allocated, count = split("large"), pa.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    try:
        for _ in read_records(large, COLUMNS):
            allocated, count = max(allocated, pa.total_allocated_bytes() - before), count + 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 20_000
    assert peak + allocated < size / 3


def test_paths_with_a_split_become_absolute_and_names_of_the_hub_do_not(here: Path) -> None:
    save(here / "one", texts(1), validation=texts(1))
    assert absolute("one@validation") == f"{here}/one@validation"
    assert [absolute(name) for name in ("tiny/chats", "tiny/chats:one@test")] == [
        "tiny/chats",
        "tiny/chats:one@test",
    ]


BAD = {
    "several@vaildation": (
        r"dataset several: has no split 'vaildation' \(did you mean 'validation'\?\) "
        r"\(found: several@train, several@validation\)"
    ),
    "one@train": "dataset one: has no splits, it is one dataset; leave @train out",
    "parts": r"dataset parts: has no split 'train': name one \(found: parts@a, parts@b\)",
    "halved": "dataset halved: halved has no state.json|state.json cannot be used",
    "lost": r"dataset lost: .*data-00000-of-00001.arrow cannot be read",
    "damaged": r"dataset damaged: .*data-00000-of-00001.arrow cannot be read",
    "one": (
        r"dataset one: no column 'texts' \(did you mean 'text'\?\) \(found: text\); name it with"
        r" --set "
    ),
}


@pytest.fixture
def bad(here: Path) -> None:
    for name in ("one", "halved", "lost", "damaged"):
        save(here / name, texts(3))
    save(here / "several", texts(1), validation=texts(1))
    parts = {name: datasets.Dataset.from_list(texts(1)) for name in "ab"}
    datasets.DatasetDict(parts).save_to_disk(here / "parts")
    (here / "halved/state.json").write_text("{")
    (here / "lost/data-00000-of-00001.arrow").unlink()
    (here / "damaged/data-00000-of-00001.arrow").write_bytes(b"no arrow")


@pytest.mark.parametrize("source", BAD)
@pytest.mark.usefixtures("bad")
def test_a_dataset_that_cannot_be_read_is_one_line(source: str) -> None:
    with pytest.raises(DataError, match=BAD[source]) as caught:
        rows(source, **{"columns.text": "texts" if source == "one" else "text"})
    assert "\n" not in str(caught.value)


def test_a_label_without_a_name_is_named_by_its_row(here: Path) -> None:
    features = datasets.Features(label=datasets.ClassLabel(names=["no", "yes"]))
    table = pa.table({"label": [0, 2]}, schema=features.arrow_schema)
    datasets.Dataset(table).save_to_disk(here / "out")
    with pytest.raises(
        DataError, match="dataset out, row 2: label 2 is out of range: the dataset names 2 classes"
    ):
        rows("out", **{"columns.label": "label"})


@pytest.mark.parametrize(
    "source", ["rows.jsonl", "data/rows.jsonl", "stdlib-docs", "../a/b", "/a/b", "a/b/c", "~/a"]
)
def test_a_source_that_is_no_dataset_is_not_looked_for_in_the_hub(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert find_split(source) is None


@pytest.fixture
def hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of datasets, and a hub that cannot be reached."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "hf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return here / "hf"


def put(cache: Path, name: str, config: str, word: str) -> None:
    """Put a dataset of the hub into the cache, where ``load_dataset`` would: a split for training,
    and one to test.
    """
    made = cache.parent / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    for kind in ("train", "test"):
        (made / f"{kind}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in texts(3, f"{word} {kind}"))
        )
    files = {kind: str(made / f"{kind}.jsonl") for kind in ("train", "test")}
    builder = datasets.load_dataset_builder("json", data_files=files, cache_dir=str(made))
    builder.download_and_prepare()
    owner, short = name.split("/")
    there = cache / f"{owner}___{short}" / config / "0.0.0" / ("0" * 40)
    shutil.copytree(builder.cache_dir, there)
    for file in there.glob("*.arrow"):
        file.rename(there / file.name.replace("json-", f"{short}-"))
    info: dict[str, Any] = json.loads((there / "dataset_info.json").read_text())
    info |= {"dataset_name": short, "config_name": config}
    (there / "dataset_info.json").write_text(json.dumps(info))


def test_a_name_of_the_hub_is_read_from_the_cache_of_datasets_and_looked_up_once(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub, "tiny/chats", "default", "chat")
    assert rows("tiny/chats") == [(f"chat train {n}",) for n in range(3)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert rows("tiny/chats@test") == [(f"chat test {n}",) for n in range(3)]
    assert split("tiny/chats").others == ("test",)


def test_a_config_is_part_of_the_name(hub: Path) -> None:
    for config in ("one", "two"):
        put(hub, "tiny/many", config, config)
    assert rows("tiny/many:two@test")[0] == ("two test 0",)
    with pytest.raises(
        DataError,
        match=r"'tiny/many': .*multiple.*one, two.*; a config is named as tiny/many:CONFIG",
    ):
        find_split("tiny/many")
    with pytest.raises(DataError, match=r"'tiny/many': .*configs in the cache: \['one', 'two'\]"):
        find_split("tiny/many:tow")
    with pytest.raises(
        DataError,
        match=r"has no split 'tset' \(did you mean 'test'\?\) \(found: tiny/many:one@train, ",
    ):
        find_split("tiny/many:one@tset")


def test_without_its_files_a_dataset_of_the_hub_is_fetched_again(hub: Path) -> None:
    put(hub, "tiny/chats", "default", "chat")
    first = split("tiny/chats")
    shutil.rmtree(hub)
    put(hub, "tiny/chats", "other", "chat")
    assert rows("tiny/chats") == [(f"chat train {n}",) for n in range(3)]
    assert split("tiny/chats").files != first.files


def test_a_hub_that_cannot_be_reached_is_one_line(hub: Path) -> None:
    with pytest.raises(
        DataError, match="data 'tiny/none': neither a file nor a folder, and not available from the"
    ):
        find_split("tiny/none")


def test_names_of_the_hub_need_an_extra(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcore_data.hub.is_installed", lambda name: False)
    with pytest.raises(DataError, match=r"Install it with: pip install datasets"):
        find_split("tiny/chats")
