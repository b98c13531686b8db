"""Files that the fuzz found: they once ended in a traceback, in several lines, or never."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoint_cases import state, write
from fuzzing import outcome
from label_cases import read_labeled

from distcore import load_config
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.choice import choose
from distcore.checkpoint.job_state import saved_judgment
from distcore.checkpoint.manifest import CHECKSUM, MANIFEST, STATE, checksum_line
from distcore.cli.inspection import ls
from distcore.config import dump_config
from distcore.resolve.resolve import resolve
from distcore_data.files import read_records

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 12)
)
CONFIGS: dict[str, tuple[str, str]] = {
    "a date that no calendar has": (
        "seed: 2021-99-99\n",
        "a value cannot be read: month must be in 1..12",
    ),
    "a number of 5,000 digits": (
        f"lr: {'1' * 5000}\n",
        "a value cannot be read: Exceeds the limit",
    ),
    "nested 2,000 deep": (
        "[" * 2000,
        "a value cannot be read: more than 50 brackets inside each other",
    ),
    "nested 2,000 deep in blocks": ("- " * 2000, "a value cannot be read: maximum recursion depth"),
    "nested 200 deep": (
        f"task_options: {'{a: ' * 200}{'}' * 200}\n",
        "more than 50 brackets inside each other",
    ),
    "ten billion values by reference": (
        f"{LAUGHS}task_options: {{a: *a11}}\n",
        "has more than 50 levels or 100000",
    ),
    "a list that holds itself": ("task_options: &a {b: *a}\n", "has more than 50 levels"),
    "a key that is the name of a type": ("str: ddp\n", "unknown key 'str'"),
    "half a surrogate pair": ('freeze: "\\ud800"\n', "is not valid text"),
    "a number of 20,000 bits": (
        f"seed: 0x{'f' * 5000}\n",
        "has a whole number of 20000 bits; expected at most 64",
    ),
    "a control character": ("seed: \x00\n", "not valid YAML: unacceptable character"),
    "a batch that has very many divisors to try": (
        "global_batch_size: 1000000000000\nnproc: 7\n",
        "cannot be shared equally by 7 ranks",
    ),
}


@pytest.mark.parametrize(("text", "said"), CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.timeout(20)
def test_config_files(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    line = outcome(
        lambda: dump_config(
            resolve(load_config(str(file), {"device": "cpu", "strategy": "ddp"})).config
        )
    )
    assert line is not None
    assert said in line


def parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def no_text() -> pa.Array:
    """A column of texts whose bytes are no UTF-8."""
    return pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )


PARQUETS: dict[str, pa.Table] = {
    "two columns of one name": pa.table(
        [pa.array(["a"]), pa.array(["b"]), pa.array([1])], ["text", "text", "label"]
    ),
    "bytes that are no text": pa.table([no_text(), pa.array([1])], ["text", "label"]),
    "a date after the year 9999": pa.table(
        [pa.array(["a"]), pa.array([2**31 - 1], pa.date32())], ["text", "label"]
    ),
}


@pytest.mark.parametrize("table", PARQUETS.values(), ids=list(PARQUETS))
def test_parquet_files(table: pa.Table, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(parquet(table))
    columns = {"columns.text": "text", "columns.label": "label"}
    line = outcome(lambda: list(read_records(file, columns)))
    assert line is not None
    assert re.search(
        rf"data file {re.escape(str(file))}(, row|: two columns are named 'text')", line
    )


STATES: dict[str, bytes] = {
    "the best evaluation is a list": b'{"progress": {}, "best": [1]}',
    "it lacks its step": b'{"progress": {}, "best": {"metric": "loss", "value": 1.0}}',
    "its value is a text": (
        b'{"progress": {}, "best": {"metric": "loss", "value": "low", "step": 1}}'
    ),
    "its value has 400 digits": (
        f'{{"best": {{"metric": "loss", "value": {"9" * 400}, "step": 1}}}}'.encode()
    ),
    "its metric is half a surrogate pair": (
        b'{"best": {"metric": "\\ud800", "value": 1.0, "step": 1}}'
    ),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "choose": lambda path: choose(path.parents[1]),
    "judgment": lambda path: saved_judgment(Checkpoint(path).job_state(), path),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoints", [state(1.0)])


def put_state(path: Path, text: bytes) -> None:
    """Replace state.json, and have the sums fit."""
    (path / STATE).write_bytes(text)
    manifest = json.loads((path / MANIFEST).read_bytes())
    manifest["files"][STATE] = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    sealed = json.dumps(manifest).encode()
    (path / MANIFEST).write_bytes(sealed)
    (path / CHECKSUM).write_bytes(checksum_line(sealed))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.json", '[{"\\u001e": 1}]'),
        ("rows.csv", "\u2028text,label\na,0\n"),
        ("rows.jsonl", '{"\\ud800": 1}\n'),
    ],
    ids=["a record separator", "a line separator", "half a surrogate pair"],
)
def test_names_of_columns(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    line = outcome(lambda: read_labeled(file))
    assert line is not None
    assert "no column 'text'" in line


@pytest.mark.parametrize("read", READERS.values(), ids=list(READERS))
@pytest.mark.parametrize("text", STATES.values(), ids=list(STATES))
def test_the_state_of_a_checkpoint(
    text: bytes, read: Callable[[Path], Any], checkpoint: Path
) -> None:
    put_state(checkpoint, text)
    line = outcome(lambda: read(checkpoint))
    assert line is not None
    assert f"{checkpoint / STATE}: " in line


@pytest.mark.parametrize("progress", [b"[]", b"3", b"{}", b'{"step": 1e999}'])
def test_a_list_of_checkpoints_says_which_is_damaged(
    progress: bytes, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_state(checkpoint, b'{"progress": ' + progress + b"}")
    assert ls(checkpoint.parents[1]) == 0
    assert capsys.readouterr().out.startswith(
        f"step-00000001  damaged: {checkpoint / STATE}: damaged: "
    )
