"""A stream of remote files that are more than the cache holds: each is fetched once an epoch, and
before it is read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shard_cases as shards
from image_cases import encoded, pixels

from distcore import DataError, RunConfig
from distcore.cli.main import main
from distcore.plugin.batching.sampling import training_plan
from distcore_data import WindowedRows, fetching, remote, room
from distcore_data.indexes import rows as indexed
from distcore_data.orders import ahead
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.image_classification.decoding import Resizing
from distcore_tasks.image_classification.task import ImageClassification
from distcore_tasks.masked_lm.task import MaskedLM
from distcore_tasks.shared import row_order
from distcore_tasks.shared.options import Filter, Order

fsspec = pytest.importorskip("fsspec")
FILES, ROWS, BATCH = 12, 64, 16
ORDER = Order(kind="windows", window_shards=3)  # of 64 rows, of three files


def images(file: int, folder: Path) -> bytes:
    """A tar file of images, all of one size."""
    rows = [
        {"png": encoded(pixels(file * ROWS + row, 4)), "cls": b"%d" % (row % 2)}
        for row in range(ROWS)
    ]
    return shards.tar(folder / "images.tar", rows).read_bytes()


def lines(file: int) -> bytes:
    return "".join(
        json.dumps({"text": f"file {file} row {row:02}"}) + "\n" for row in range(ROWS)
    ).encode()


@pytest.fixture
def size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of a remote file; the cache has room for seven of the twelve."""
    system = fsspec.filesystem("memory")
    for file in range(FILES):
        system.pipe(f"/streamed/{file + 10}.jsonl", lines(file))
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(room.LIMIT, str(7 * len(lines(0))))
    remote.copies_of.cache_clear()
    return len(lines(0))


def streamed(data: str, **options: Any) -> Any:
    task = MaskedLM(
        data=data,
        stream=True,
        split_texts=False,
        order=ORDER,
        eval_data=data.split(",")[0],
        **options,
    )
    return task.prepare(RunConfig()).train


def streamed_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """As ``streamed``, and the size of a file, of which the cache has room for seven, too."""
    system = fsspec.filesystem("memory")
    for file in range(FILES):
        system.pipe(f"/images/{file + 10}.tar", content := images(file, folder))
    monkeypatch.setenv(room.LIMIT, str(7 * len(content)))
    data = "memory://images/*.tar"
    task = ImageClassification(data=data, eval_data=data, stream=True, order=ORDER)
    return task.prepare(RunConfig()).train, len(content)


def epoch(rows: Any, number: int) -> Iterator[np.ndarray]:
    """Read the rows of an epoch, and yield those of each step, when nothing is fetched."""
    plan = training_plan(RunConfig(global_batch_size=BATCH, micro_batch_size=BATCH), rows)
    for step in range(plan.steps):
        numbers = plan.rows(number, step)
        thread = ahead._AHEAD
        assert thread is None or thread.name == "distcore-fetch"
        if thread:
            thread.join()
        rows.batch(numbers)
        yield numbers


@pytest.mark.programs
@pytest.mark.parametrize("kind", ["jsonl", "tar"])
def test_each_file_is_fetched_once_before_it_is_read_and_makes_room(
    kind: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, late, most, seen = list[str](), list[Path](), 0, list[int]()
    if kind == "jsonl":
        rows, folder = streamed("memory://streamed/*.jsonl"), "streamed"
    else:
        (rows, size), folder = streamed_images(tmp_path, monkeypatch), "images"
    write, present = fetching._write, fetching.present

    def written(file: Any, draft: Path) -> None:
        fetched.append(file.name)
        write(file, draft)

    def asked(files: Iterable[Path]) -> Iterator[Path]:
        some = list(files)
        if threading.current_thread() is threading.main_thread():
            late.extend(file for file in some if not file.is_file())
        return present(some)

    for copy in room.copies_folder().rglob(f"*.{kind}"):
        copy.unlink()
    monkeypatch.setattr(fetching, "_write", written)
    monkeypatch.setattr(indexed, "present", asked)
    for numbers in epoch(rows, 0):
        seen += numbers.tolist()
        most = max(
            most, sum(copy.stat().st_size for copy in room.copies_folder().rglob(f"*.{kind}"))
        )
    assert sorted(seen) == list(range(FILES * ROWS))
    assert sorted(fetched) == sorted(f"/{folder}/{file + 10}.{kind}" for file in range(FILES))
    assert {file.name for file in late} <= {
        f"10.{kind}",
        *(Path(name).name for name in fetched[:1]),
    }
    assert most <= 7 * size


@pytest.mark.programs
def test_evaluation_images_in_all_of_more_than_the_cache_holds_are_a_warning(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed_images(tmp_path, monkeypatch)
    task = ImageClassification(data="memory://images/*.tar", stream=True, order=ORDER)
    assert [
        line for line in task.prepare(RunConfig()).warnings if "each evaluation fetches all" in line
    ]
    monkeypatch.setenv(room.LIMIT, str(2**30))
    assert not [line for line in task.prepare(RunConfig()).warnings if "evaluation" in line]
    monkeypatch.setenv(room.LIMIT, str(2**16))
    with pytest.raises(
        DataError, match=r"each step reads rows of all files, .*; set order\.kind=windows, or raise"
    ):
        ImageClassification(data="memory://images/*.tar", stream=True).prepare(RunConfig())


@pytest.mark.programs
def test_windows_of_a_stream_are_of_whole_remote_files_and_parts_of_others(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_order, "PIECE", 16)
    of_files = streamed("memory://streamed/*.jsonl").row_order.order
    assert isinstance(of_files, WindowedRows)
    assert (np.diff(of_files.bounds[np.arange(FILES + 1)]) == ROWS).all()
    assert (len(of_files.bounds), of_files.window) == (FILES + 1, 3)
    for file in range(3):
        (tmp_path / f"{file}.jsonl").write_bytes(lines(file))
    local = streamed(str(tmp_path / "*.jsonl")).row_order
    assert (np.diff(local.bounds[np.arange(len(local.bounds))]) == 16).all()
    assert (len(local.bounds), local.window) == (3 * ROWS // 16 + 1, 12)
    chosen = streamed(str(tmp_path / "*.jsonl"), filter=Filter("text", "row [01]")).row_order
    assert len(chosen) == 3 * 20
    assert set(np.diff(chosen.bounds[np.arange(len(chosen.bounds))]).tolist()) == {16, 4}


def test_a_stored_corpus_has_the_order_that_it_had(size: int, tmp_path: Path) -> None:
    data = "memory://streamed/*.jsonl"
    stored: Any = MaskedLM(data=data, eval_data=data, order=ORDER).prepare(RunConfig()).train
    assert isinstance(stored.row_order, WindowedRows)
    assert stored.row_order.bounds[np.array([1])].tolist() == [64]


def test_sources_of_a_mixture_have_windows_of_their_own_files(size: int, tmp_path: Path) -> None:
    (tmp_path / "local.jsonl").write_bytes(lines(0))
    order = Order(kind="windows", window_shards=2, mix={"rows": 0.5, "local": 0.5})
    for file in range(2):
        fsspec.filesystem("memory").pipe(f"/of{file}/rows.jsonl", lines(file))
    data = f"memory://of1/rows.jsonl,{tmp_path / 'local.jsonl'}"
    task = CausalLM(data=data, stream=True, order=order, eval_data=str(tmp_path / "local.jsonl"))
    rows: Any = task.prepare(RunConfig()).train
    assert [len(source) for source in rows.row_order.order.sources] == [ROWS, ROWS]
    seen = np.concatenate(list(epoch(rows, 0)))
    assert sorted(seen.tolist()) == list(range(2 * ROWS))


@pytest.mark.programs
def test_a_full_shuffle_of_more_than_the_cache_is_refused(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = MaskedLM(data="memory://streamed/*.jsonl", stream=True, split_texts=False)
    with pytest.raises(
        DataError,
        match=r"streamed/\*.jsonl: each step reads .* the cache holds .*; set order.kind=windows",
    ):
        task.prepare(RunConfig())
    monkeypatch.setenv(room.LIMIT, str(2 * FILES * size))
    assert len(task.prepare(RunConfig()).train) == round(0.9 * FILES * ROWS)


@pytest.mark.programs
def test_remote_images_that_the_cache_does_not_hold_are_not_copied_to_it(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, size = streamed_images(tmp_path, monkeypatch)
    data = "memory://images/*.tar"
    what = (
        f"data file {data}: the cache copies the images of all files, {12 * size} bytes, and the"
        " cache holds"
    )
    with pytest.raises(DataError) as error:
        ImageClassification(data=data).prepare(RunConfig())
    limit = f"{7 * size}; --stream true reads them as they come, or raise {room.LIMIT}"
    assert str(error.value) == f"{what} {limit}"
    few = str(
        shards.tar(
            tmp_path / "few.tar",
            [{"png": encoded(pixels(row, 4)), "cls": b"%d" % row} for row in (0, 1)],
        )
    )
    held: Any = ImageClassification(data=few, eval_data=data).prepare(RunConfig()).evaluation
    asked: list[Any] = [record for (record,) in ImageClassification().open_rows(Path(data), {})]
    # of the few
    assert not list(tmp_path.rglob("images.bin")) or len(list(tmp_path.rglob("images.bin"))) == 1
    assert sum(copy.stat().st_size for copy in room.copies_folder().rglob("*.tar")) <= 7 * size
    monkeypatch.setenv(room.LIMIT, str(12 * size))
    ImageClassification(data=data).prepare(RunConfig())
    stored: Any = ImageClassification(data=few, eval_data=data).prepare(RunConfig()).evaluation
    copied: list[Any] = [record for (record,) in ImageClassification().open_rows(Path(data), {})]
    rows = np.arange(FILES * ROWS)
    for name, values in stored.batch(rows).items():
        assert held.batch(rows)[name].tolist() == values.tolist()
    assert [*held.origins()] == [*stored.origins()]
    for one, other in zip(asked, copied, strict=True):
        assert one.store.origin(one.row) == other.store.origin(other.row)
        given, expected = (image.store.pixels(image.row, Resizing(8, 2)) for image in (one, other))
        assert given.tolist() == expected.tolist()
    monkeypatch.setenv(room.LIMIT, str(7 * size))
    # the copies are there
    assert len(ImageClassification(data=data).prepare(RunConfig()).train) > 0


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_predict_and_evaluate_remote_images_as_those_of_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    for file in range(FILES):
        (tmp_path / f"{file + 10}.tar").write_bytes(content := images(file, tmp_path))
    monkeypatch.setenv(room.LIMIT, str(5 * len(content) // 2))
    flags = [
        "--device",
        "cpu",
        "--max-steps",
        "2",
        "--global-batch-size",
        "8",
        "--out",
        str(tmp_path / "run"),
    ]
    command = ["train", "--task", "image-classification", "--data", str(tmp_path / "10.tar")]
    command += flags
    assert main(command) == 0
    told, lines = list[str](), list[list[dict[str, Any]]]()
    for number, (scheme, ranks) in enumerate([("", "1"), ("file://", "1"), ("file://", "2")]):
        data, out = f"{scheme}{tmp_path}/1?.tar", tmp_path / f"{number}.jsonl"
        some = ["--data", data, "--nproc", ranks, "--strategy", "ddp"]
        assert main(["predict", str(tmp_path / "run"), *some, "--out", str(out)]) == 0
        lines.append([json.loads(line) | {"file": ""} for line in out.read_text().splitlines()])
        capfd.readouterr()
        assert main(["eval", str(tmp_path / "run"), *some]) == 0
        told += [line for line in capfd.readouterr().out.splitlines() if "evaluated" in line]
    for line, *others in zip(*lines, strict=True):
        for other in others:
            assert other.pop("scores") == pytest.approx(line["scores"], abs=2e-6)
            assert other == {key: value for key, value in line.items() if key != "scores"}
    assert len(lines[0]) == 10 * ROWS
    assert len(told) == 3
    assert len({*told}) == 1
    assert (
        sum(copy.stat().st_size for copy in room.copies_folder().rglob("*.tar"))
        <= 5 * len(content) // 2
    )


@pytest.mark.programs
def test_an_image_that_is_none_is_named_before_any_is_predicted(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(room.LIMIT, "4000")
    for file in range(3):
        rows = [
            {"png": b"none" if (file, row) == (1, 2) else encoded(pixels(row, 4))}
            for row in range(4)
        ]
        content = shards.tar(tmp_path / "images.tar", rows).read_bytes()
        fsspec.filesystem("memory").pipe(f"/damaged/{file}.tar", content)
    monkeypatch.setenv(room.LIMIT, str(2 * len(content)))
    with pytest.raises(
        DataError, match=r"data file memory://damaged/1\.tar, row 3: is no image that Pillow knows"
    ):
        next(ImageClassification().open_rows(Path("memory://damaged/*.tar"), {}))
