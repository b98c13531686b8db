"""Files of a bucket, read from a real server of the S3 protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shard_cases as shards

from distcore import DataError
from distcore_data import IndexedRows, fetching, read_records, remote, room, source_digest

moto = pytest.importorskip("moto.server", reason="needs moto, of make shards")
boto3 = pytest.importorskip("boto3")
pytest.importorskip("s3fs")
ROWS = [f"row {number}" for number in range(9)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a server on loopback; one for all tests, since fsspec keeps its clients."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the server, with a bucket that has two files of rows."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of-a-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "FIRST_WAIT", 0)
    client = boto3.client("s3", endpoint_url=address)
    client.create_bucket(Bucket="rows")
    for name, part in {"a": ROWS[:4], "b": ROWS[4:]}.items():
        client.put_object(Bucket="rows", Key=f"set/{name}.jsonl", Body=lines(part))
    remote.copies_of.cache_clear()
    return client


def lines(rows: list[str]) -> bytes:
    return "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    "source",
    ["s3://rows/set", "s3://rows/set/*.jsonl", "s3://rows/set/a.jsonl,s3://rows/set/b.jsonl"],
)
def test_a_bucket_has_the_rows_of_its_files(bucket: Any, source: str) -> None:
    assert [text for (text,) in read_records(Path(source), {"columns.text": "text"})] == ROWS


@pytest.mark.parametrize("form", ["mds zstd", "litdata values"])
def test_a_bucket_has_the_rows_of_shards(bucket: Any, form: str, tmp_path: Path) -> None:
    folder = shards.written(tmp_path / "local", form, shards.texts(30))
    for file in folder.iterdir():
        bucket.upload_file(str(file), "rows", f"shards/{file.name}")
    asked = {"columns.text": "text", "columns.label": "label"}
    assert list(read_records(Path("s3://rows/shards"), asked)) == list(read_records(folder, asked))
    assert IndexedRows(Path("s3://rows/shards"), asked)[[29]] == [("row 29 ist grün", 1)]


def test_a_changed_object_is_another_source_and_a_missing_one_is_one_line(bucket: Any) -> None:
    before = source_digest(Path("s3://rows/set"))
    bucket.put_object(Bucket="rows", Key="set/b.jsonl", Body=lines(["other"]))
    remote.copies_of.cache_clear()
    assert source_digest(Path("s3://rows/set")) != before
    with pytest.raises(DataError, match=r"s3://rows/none\.jsonl"):
        list(read_records(Path("s3://rows/none.jsonl"), {"columns.text": "text"}))


class Parts:
    """Some rows at a time; a dataset of torch."""

    def __init__(self, rows: IndexedRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 3

    def __getitem__(self, part: int) -> list[Any]:
        return list(self.rows[range(3 * part, 3 * part + 3)])


def test_loader_processes_fetch_what_they_read(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.data import DataLoader

    monkeypatch.setenv(room.LIMIT, str(len(lines(ROWS[4:]))))  # for one file at a time
    parts: Any = Parts(IndexedRows(Path("s3://rows/set"), {"columns.text": "text"}))
    loader = DataLoader(parts, None, num_workers=2)
    assert [text for part in loader for (text,) in part] == ROWS
