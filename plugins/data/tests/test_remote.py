"""Remote files: the rows of local ones, fetched once, again where a network fails, and
noticed where they change.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import shard_cases as shards

from distcore import DataError
from distcore_data import (
    IndexedRows,
    fetching,
    files_of,
    present,
    read_records,
    remote,
    room,
    source_digest,
    source_name,
)
from distcore_data.indexes import rows as index_rows

fsspec = pytest.importorskip("fsspec")
ROWS = [f"row {number}" for number in range(9)]
SOURCE = Path("memory://bucket/rows.jsonl")


def lines(rows: list[str]) -> bytes:
    return "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()


def texts(source: str | Path) -> list[object]:
    return [text for (text,) in read_records(Path(source), {"columns.text": "text"})]


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket in memory, and a cache of the test's own."""
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "FIRST_WAIT", 0)
    monkeypatch.delenv(room.LIMIT, raising=False)
    system = fsspec.filesystem("memory")
    system.pipe({"/bucket/rows.jsonl": lines(ROWS), "/bucket/set/b.jsonl": lines(ROWS[4:])})
    system.pipe(
        {
            "/bucket/set/a.jsonl": lines(ROWS[:4]),
            "/bucket/set/notes.md": b"none",
            "/bucket/photos/red/1.png": b"",
        }
    )
    restart()
    yield system
    system.rm("/bucket", recursive=True)


def restart() -> None:
    """Forget what this process has seen, as a new one."""
    remote.copies_of.cache_clear()


@pytest.mark.parametrize(
    "source",
    [
        "memory://bucket/rows.jsonl", "memory://bucket/set", "memory://bucket/set/*.jsonl",
        "memory://bucket/set/a.jsonl,memory://bucket/set/b.jsonl",
    ],
)  # fmt: skip
def test_a_url_has_the_rows_of_its_files(source: str) -> None:
    assert texts(source) == ROWS


def test_a_list_file_may_name_urls(tmp_path: Path) -> None:
    (tmp_path / "rows.list").write_text(
        "memory://bucket/set/a.jsonl\nmemory://bucket/set/b.jsonl\n"
    )
    assert texts(tmp_path / "rows.list") == ROWS


def test_messages_name_the_url() -> None:
    assert source_name(SOURCE) == "data file memory://bucket/rows.jsonl"
    assert remote.url_of(Path("file:///bucket/rows.jsonl")) == "file:///bucket/rows.jsonl"
    assert (
        fetching.RemoteFile(None, "/bucket/rows.jsonl", "file:///bucket", 0).own_url
        == "file:///bucket/rows.jsonl"
    )
    assert (
        fetching.RemoteFile(None, "/bucket/rows.jsonl", "memory://bucket", 0).own_url
        == "memory://bucket/rows.jsonl"
    )
    assert remote.url_of("s3:/bucket/rows.jsonl") == "s3://bucket/rows.jsonl"
    assert [
        remote.url_of(path) for path in ("rows.jsonl", "/data/rows:1.jsonl", "C:/rows", "a:b/c")
    ] == [None] * 4


def counted(monkeypatch: pytest.MonkeyPatch, failures: int = 0, cut: int = 0) -> list[str]:
    """The names of opened files; the first ``failures`` of them fail, the
    first ``cut`` end early.
    """
    opened, system = list[str](), type(fsspec.filesystem("memory"))
    open_file = system.open

    def counting(self: Any, path: str, *arguments: Any, **named: Any) -> Any:
        opened.append(path)
        if len(opened) <= failures:
            raise ConnectionError("the network is away")
        file = open_file(self, path, *arguments, **named)
        if len(opened) <= cut:
            file.seek(20)
        return file

    monkeypatch.setattr(system, "open", counting)
    return opened


def test_a_file_is_fetched_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = counted(monkeypatch)
    for _ in range(3):
        restart()
        assert texts(SOURCE) == texts(SOURCE) == ROWS
    assert len(opened) == 1


def test_several_files_are_fetched_at_a_time_and_after_an_error_no_more(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:02}.jsonl" for number in range(3 * fetching.AT_ONCE)]
    bucket.pipe({f"/bucket/many/{name}": lines([name]) for name in names})
    together, opened, failing = (
        threading.Barrier(fetching.AT_ONCE, timeout=60),
        list[str](),
        list[str](),
    )

    def meeting(file: fetching.RemoteFile, draft: Path) -> None:
        opened.append(file.name)
        if failing:
            time.sleep(0.2)
            raise PermissionError(file.name)
        together.wait()
        write(file, draft)

    write = fetching._write
    monkeypatch.setattr(fetching, "_write", meeting)
    assert texts("memory://bucket/many") == names
    bucket.pipe({f"/bucket/many/{name}": lines([f"another {name}"]) for name in names})
    restart()
    opened.clear()
    failing.append("")
    with pytest.raises(
        DataError, match=r"^data file memory://bucket/many: cannot be read: PermissionError"
    ):
        texts("memory://bucket/many")
    assert len(opened) < len(names)
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


@pytest.mark.parametrize("problem", ["failures", "cut"])
def test_an_interrupted_fetch_is_tried_again_and_then_one_line(
    problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = counted(monkeypatch, **{problem: fetching.TRIES - 1})
    assert texts(SOURCE) == ROWS
    assert len(opened) == fetching.TRIES
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        ("failures", "ConnectionError the network is away"),
        ("cut", "EOFError 142 of 162 bytes came"),
    ],
)
@pytest.mark.parametrize("read", [texts, source_digest])
def test_after_the_last_try_there_is_one_line_and_no_copy(
    read: Any, problem: str, why: str, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted(monkeypatch, **{problem: 99})
    line = f"data file memory://bucket/rows.jsonl: cannot be fetched, after 4 attempts: {why}"
    with pytest.raises(DataError) as error:
        read(SOURCE)
    assert str(error.value) == line
    assert not list((tmp_path / "cache").rglob("*rows.jsonl"))


def test_a_changed_file_is_other_rows(bucket: Any) -> None:
    digest = source_digest(SOURCE)
    bucket.pipe("/bucket/rows.jsonl", lines([*ROWS[:-1], "row 9"]))  # of the same size
    assert source_digest(SOURCE) == digest, "a process sees one version"
    restart()
    assert source_digest(SOURCE) != digest
    assert texts(SOURCE)[-1] == "row 9"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("memory://bucket/none.jsonl", "data file memory://bucket/none.jsonl: no such file"),
        (
            "memory://bucket/photos",
            (
                "data file memory://bucket/photos: is a folder without data files; write folders of"
                " files as .tar"
            ),
        ),
        ("memory://bucket/*.csv", "data file memory://bucket/*.csv: no file has such a name"),
        (
            "nothing://bucket/a.csv",
            "data file nothing://bucket/a.csv: cannot be opened: ValueError Protocol not known: ",
        ),
    ],
)
def test_a_remote_file_that_is_not_there_is_one_line(source: str, line: str) -> None:
    with pytest.raises(DataError) as error:
        texts(source)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_without_fsspec_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        DataError, match=r"rows\.jsonl: needs fsspec; pip install 'distcore-data\[remote\]'$"
    ):
        texts(SOURCE)


def test_without_what_fsspec_needs_for_http_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch brings fsspec alone."""

    def refuse(url: str, **options: Any) -> None:
        raise ImportError('HTTPFileSystem requires "requests" and "aiohttp" to be installed')

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(
        DataError, match=r"rows\.jsonl: needs aiohttp; pip install 'distcore-data\[remote\]'$"
    ):
        texts("https://nowhere.invalid/rows.jsonl")


def test_copies_that_were_read_longest_ago_make_room(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(lines(ROWS))
    monkeypatch.setenv(room.LIMIT, str(2 * size))
    copies = list[Path]()
    for age, name in enumerate(("first", "second", "third")):
        bucket.pipe(f"/bucket/{name}.jsonl", lines(ROWS))
        copies += present(files_of(Path(f"memory://bucket/{name}.jsonl")))
        os.utime(copies[-1], (1000 + age, 1000 + age))
    assert [copy.is_file() for copy in copies] == [False, True, True]
    restart()
    assert texts("memory://bucket/first.jsonl") == ROWS


def copies(cache: Path) -> list[str]:
    return sorted(file.name for file in (cache / "cache/remote").glob("*/*.jsonl"))


def test_the_files_that_come_next_are_fetched_while_one_is_read(
    bucket: Any, tmp_path: Path
) -> None:
    bucket.pipe({f"/bucket/many/{number:02}.jsonl": lines(ROWS) for number in range(20)})
    rows = read_records(Path("memory://bucket/many"), {"columns.text": "text"})
    assert next(rows) == ("row 0",)
    until = time.monotonic() + 60
    while len(copies(tmp_path)) < fetching.AT_ONCE and time.monotonic() < until:
        time.sleep(0.01)
    rows.close()  # type: ignore[attr-defined]
    assert copies(tmp_path) == [f"{number:02}.jsonl" for number in range(fetching.AT_ONCE)]
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def test_a_reader_that_ends_in_a_thread_of_its_own_holds_no_copies(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.pipe({f"/bucket/many/{number:02}.jsonl": lines(ROWS) for number in range(4)})
    reader = present(files_of(Path("memory://bucket/many")))
    yielded, ended, fetch = threading.Event(), threading.Event(), fetching._fetch

    def last(file: fetching.RemoteFile | None, copy: Path) -> None:
        fetch(file, copy)
        if copy.name == "03.jsonl":
            yielded.wait(60)
            # as Python's garbage collector does, in whatever thread it runs
            reader.close()
            ended.set()

    monkeypatch.setattr(fetching, "_fetch", last)
    assert next(reader).name == "00.jsonl"
    yielded.set()
    assert ended.wait(60)
    assert not room.HELD
    for thread in threading.enumerate():  # those that still fetch would open files of the next test
        if "ThreadPool" in thread.name:
            thread.join(60)


def test_more_rows_than_the_cache_has_room_for_are_dropped_when_they_are_read(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:02}.jsonl" for number in range(10)]
    bucket.pipe(
        {f"/bucket/many/{name}": lines([f"{name} {row}" for row in range(9)]) for name in names}
    )
    size = len(lines([f"{names[0]} {row}" for row in range(9)]))
    monkeypatch.setenv(room.LIMIT, str(4 * size + 1))
    assert texts(SOURCE) == ROWS
    opened, most, seen = counted(monkeypatch), 0, list[object]()
    for text in texts_one_by_one("memory://bucket/many"):
        most, seen = max(most, len(copies(tmp_path))), [*seen, text]
    assert seen == [f"{name} {row}" for name in names for row in range(9)]
    assert (most, len(opened)) == (4, 10)
    assert copies(tmp_path)[:2] == names[:2], "the next reader begins with these"
    restart()
    assert texts("memory://bucket/many") == seen
    assert len(opened) < 20
    rows = IndexedRows(Path("memory://bucket/many"), {"columns.text": "text"})
    assert rows[[89, 0, 45]] == [("09.jsonl 8",), ("00.jsonl 0",), ("05.jsonl 0",)]


def texts_one_by_one(source: str) -> Iterator[object]:
    return (text for (text,) in read_records(Path(source), {"columns.text": "text"}))


def test_a_digest_is_told_without_the_file_once_it_is_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, opened = source_digest(SOURCE), counted(monkeypatch)
    for copy in (tmp_path / "cache/remote").glob("*/*"):
        copy.unlink()
    restart()
    assert source_digest(SOURCE) == digest
    assert opened == []
    assert texts(SOURCE) == ROWS
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        (
            "100",
            (
                "data file memory://bucket/rows.jsonl: has 162 bytes, and the cache 100; raise"
                " DISTCORE_REMOTE_BYTES"
            ),
        ),
        ("1e9", "DISTCORE_REMOTE_BYTES=1e9: expected a number of bytes"),
    ],
)
def test_a_cache_that_is_too_small_is_one_line(
    limit: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(room.LIMIT, limit)
    with pytest.raises(DataError) as error:
        texts(SOURCE)
    assert str(error.value) == line


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An HTTP server on this machine: its URL and its folder."""
    pytest.importorskip("aiohttp")
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


def test_a_file_of_an_http_server(server: tuple[str, Path]) -> None:
    url, folder = server
    (folder / "all rows.jsonl").write_bytes(lines(ROWS))
    assert texts(f"{url}/all%20rows.jsonl?version=1") == ROWS
    os.utime(folder / "all rows.jsonl", (1000, 1000))
    [copy] = files_of(Path(f"{url}/all%20rows.jsonl?version=1"))
    restart()
    assert files_of(Path(f"{url}/all%20rows.jsonl?version=1")) != [copy]
    with pytest.raises(DataError, match=rf"^data file {url}/none.jsonl: no such file$"):
        texts(f"{url}/none.jsonl")


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (403, r"may not be read: HTTP 403, Forbidden; check the URL, and the credentials for it"),
        (
            401,
            r"may not be read: HTTP 401, Unauthorized; check the URL, and the credentials for it",
        ),
        (410, "no such file"),
        (503, "cannot be fetched: HTTP 503"),
    ],
)
def test_an_answer_of_a_server_that_refuses_is_no_missing_file(
    status: int, line: str, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: SimpleHTTPRequestHandler) -> None:
        self.send_error(status)

    for method in ("do_GET", "do_HEAD"):
        monkeypatch.setattr(SimpleHTTPRequestHandler, method, refuse)
    with pytest.raises(DataError, match=rf"^data file {server[0]}/rows\.jsonl: {line}"):
        texts(f"{server[0]}/rows.jsonl")


@pytest.mark.parametrize(
    ("form", "removals"), [("jsonl", 1), ("tar", 1), ("arrow", 1), ("jsonl", 9)]
)
def test_a_copy_that_another_process_removes_before_it_is_read_is_fetched_again(
    form: str, removals: int, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": text, "label": 0} for text in ROWS]
    local = (
        shards.tar(tmp_path / "a.tar", shards.members(rows))
        if form == "tar"
        else tmp_path / f"a.{form}"
    )
    if form != "tar":
        local.write_bytes(
            lines(ROWS) if form == "jsonl" else shards.arrow_bytes(rows, indexed=True)
        )
    bucket.pipe(f"/bucket/a.{form}", local.read_bytes())
    indexed, left, real = (
        IndexedRows(Path(f"memory://bucket/a.{form}"), {"columns.text": "text"}),
        [removals],
        present,
    )

    def removed(files: Any) -> Iterator[Path]:
        for file in real(files):
            if left[0]:
                left[0] -= 1
                file.unlink()
            yield file

    monkeypatch.setattr(index_rows, "present", removed)
    if removals == 1:
        assert indexed[[8]] == [(ROWS[8],)]
    else:
        with pytest.raises(
            DataError, match=r"^data file memory://bucket/a.jsonl: other processes remove it"
        ):
            indexed[[8]]
