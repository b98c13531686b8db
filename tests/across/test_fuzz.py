"""10,000 made-up files: each is read, or refused in one line; nothing else
is raised, nothing hangs.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from fuzzing import VALUES, changed, edited, outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from label_cases import read_labeled, texts_of

from distcore import RunConfig, load_config, train
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.choice import choose
from distcore.checkpoint.job_state import saved_progress
from distcore.checkpoint.manifest import CHECKSUM, MANIFEST, STATE, checksum_line
from distcore.cli.inspection import ls, verify
from distcore.config import dump_config, flatten
from distcore.jobs.evaluate import config_for
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.problems import PROBLEMS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

fuzz = settings(
    max_examples=2500,
    # of one case: a reader that hangs is found by the test's own limit
    deadline=timedelta(seconds=10),
    database=None,
    suppress_health_check=list(HealthCheck),
)

CONFIGS = [
    dump_config(load_config(None, {"max_steps": 3, "preset": "fast"})).encode(),
    (
        b"strategy: ddp\nnproc: 2\nstrategy_options: {bucket_mb: 5}\ntask_options:\n  model:"
        b" bert-tiny\n"
    ),
    (
        b"preset: fast\noptimizer: {betas: [0.9, 0.99]}\nextensions: {profile: {steps: 3}}\nclip:"
        b" {norm: null}\n"
    ),
    b"base: &a {x: 1}\ntask_options: *a\nresume_changed: lr,seed\n",
]
IN_YAML = [
    b"&a ",
    b"*a",
    b"!!int x",
    b"!!python/object:os.system ",
    b"2021-99-99",
    b"[" * 2000,
    b"{",
    b"? ",
    b"<<: ",
    b": ",
    b"\x00",
    b"\xff",
    b'"\\ud800"',
    b"1" * 5000,
    b"0x",
    b"1:60:60",
    b"\t",
    b"---\n",
    b"...\n",
    b"|\n",
    b"= ",
    b".nan",
]
KEYS = [*flatten(RunConfig().model_dump()), *RunConfig.model_fields, "model", "data", "columns"]


def nested(changes: dict[str, Any]) -> dict[str, Any]:
    """The tree that dotted keys stand for, as far as they do not contradict each other."""
    tree: dict[str, Any] = {}
    for dotted, value in changes.items():
        *parents, leaf = dotted.split(".")
        inside: Any = tree
        for parent in parents:
            inside = inside.setdefault(parent, {}) if isinstance(inside, dict) else {}
        if isinstance(inside, dict):
            inside[leaf] = value
    return tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_config_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    file, seen = folder / "job.yaml", set[bool]()
    trees = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=2).map(nested)
    as_yaml = trees.map(
        lambda tree: yaml.dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")
    )

    @fuzz
    @given(
        st.one_of(
            edited(CONFIGS, IN_YAML), as_yaml, trees.map(lambda tree: json.dumps(tree).encode())
        )
    )
    def check(data: bytes) -> None:
        file.write_bytes(data)

        def read() -> None:
            config = load_config(str(file), {"device": "cpu"})
            dump_config(config).encode()
            dump_config(resolve(config).config).encode()

        seen.add(outcome(read) is None)

    check()
    assert seen == {True, False}


ROWS = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}, {"text": "so so", "label": 1}]
TEXTS = {
    ".json": [
        json.dumps(ROWS).encode(),
        json.dumps([[row["text"], row["label"]] for row in ROWS]).encode(),
    ],
    ".jsonl": [b"\n".join(json.dumps(row).encode() for row in ROWS)],
    ".csv": [
        b"text,label\ngood,1\nbad,0\n",
        b'text;label\n"a ""b""\nc";yes\nd;no\n',
        b"label\ttext\r\n1\tx\r\n",
    ],
}
IN_TEXT = [
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b'"\\ud800"',
    b"[" * 2000,
    b'{"a":' * 2000,
    b"1" * 5000,
    b"1e999",
    b"NaN",
    b"\r",
    b"\n",
    b'"',
    b'""',
    b",",
    b";",
    b"\t",
    b"null",
    b"true",
    b"-0",
    b"{}",
    b"[]",
    b"\xe2\x80\xa8",
    b"9" * 30,
    b"1.5",
]


def parquet(**columns: pa.Array) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(list(columns.values()), names=list(columns)), file)
    return file.getvalue()


PARQUETS = [
    parquet(text=pa.array(["good", "bad", "so so"]), label=pa.array([1, 0, 1])),
    parquet(text=pa.array(["a", None]).dictionary_encode(), label=pa.array(["x", "y"])),
    parquet(
        text=pa.array(["a", "b"]), label=pa.array([datetime(2020, 1, 1), datetime(2021, 1, 1)])
    ),
    parquet(text=pa.array(["a", "b"]), label=pa.array([[1], [2, 3]]), id=pa.array([1.5, 2.5])),
]


def test_data_files(folder: Path) -> None:
    seen = set[bool]()
    texts = [
        st.tuples(st.just(suffix), edited(originals, IN_TEXT))
        for suffix, originals in TEXTS.items()
    ]
    trees = st.tuples(
        st.just(".json"), (changed(ROWS) | VALUES).map(lambda tree: json.dumps(tree).encode())
    )

    @fuzz
    @given(
        st.one_of(*texts, trees, st.tuples(st.just(".parquet"), edited(PARQUETS, IN_TEXT[:4]))),
        st.sampled_from(sorted(PROBLEMS)),
        st.sampled_from([None, None, "id", "label"]),
    )
    def check(given_file: tuple[str, bytes], problem: str, identity: str | None) -> None:
        suffix, data = given_file
        file = folder / f"rows{suffix}"
        file.write_bytes(data)

        def read() -> None:
            rows = read_labeled(file, Columns(id=identity), problem_type=problem)
            for text in texts_of(rows):
                text.encode()
            PROBLEMS[problem].classes(rows)

        seen.add(outcome(read) is None)

    check()
    assert seen == {True, False}


JOB: dict[str, Any] = {
    "device": "cpu",
    "max_steps": 2,
    "global_batch_size": 4,
    "lr": 0.01,
    "extensions": {"progress": False},
}


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A run folder with a checkpoint of a few small tensors."""
    train(RunConfig(out=str(folder / "run"), **JOB), Problem())
    return folder / "run"


@pytest.fixture
def trained(run: Path, tmp_path: Path) -> Path:
    """A copy of it for a test to damage."""
    return Path(shutil.copytree(run, tmp_path / "run"))


class Sealed:
    """A checkpoint of which one file is replaced and the sums are made to fit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clean = {file.name: file.read_bytes() for file in path.iterdir()}
        self.manifest = json.loads(self.clean[MANIFEST])
        self.state = json.loads(self.clean[STATE])

    def put(self, name: str, data: bytes) -> None:
        for other, content in self.clean.items():
            (self.path / other).write_bytes(content)
        if name != MANIFEST:
            (self.path / name).write_bytes(data)
            listed = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            tree = self.manifest | {"files": self.manifest["files"] | {name: listed}}
            data = json.dumps(tree).encode()
        (self.path / MANIFEST).write_bytes(data)
        (self.path / CHECKSUM).write_bytes(checksum_line(data))

    def everything(self) -> list[Callable[[], object]]:
        """All readers of a checkpoint: the commands, an evaluation, a resume up to its run."""
        run = self.path.parents[1]

        def tensors() -> None:
            checkpoint = Checkpoint(self.path)
            for name in checkpoint:
                assert list(checkpoint[name].shape) == checkpoint.entry(name).shape

        return [
            lambda: ls(self.path),
            lambda: verify(self.path),
            tensors,
            lambda: choose(run),
            lambda: choose(run, best=True),
            lambda: config_for(self.path, 1, {}),
            lambda: saved_progress(Checkpoint(self.path).job_state(), self.path),
        ]


def as_json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


IN_JSON = [
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b'"',
    b"[" * 3000,
    b"1" * 5000,
    b'"\\ud800"',
    b"\x00",
    b"\xff",
    b"{}",
    b"[]",
]


def test_json_of_checkpoints(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (trained / "checkpoints").iterdir()
    sealed, seen = Sealed(path), set[bool]()
    states = changed(sealed.state).map(as_json) | edited([sealed.clean[STATE]], IN_JSON)
    manifests = changed(sealed.manifest).map(as_json) | edited([sealed.clean[MANIFEST]], IN_JSON)

    @fuzz
    @given(st.tuples(st.just(STATE), states) | st.tuples(st.just(MANIFEST), manifests))
    def check(file: tuple[str, bytes]) -> None:
        sealed.put(*file)
        seen.update(outcome(action) is None for action in sealed.everything())
        capsys.readouterr()

    check()
    assert seen == {True, False}


def test_headers_of_safetensors(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (trained / "checkpoints").iterdir()
    sealed, seen = Sealed(path), set[bool]()
    name = next(name for name in sealed.clean if name.startswith("model-"))
    size = int.from_bytes(sealed.clean[name][:8], "little")
    header, rest = json.loads(sealed.clean[name][8 : 8 + size]), sealed.clean[name][8 + size :]
    lengths = st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1])

    def whole(text: bytes, length: int | None = None) -> bytes:
        return (len(text) if length is None else length).to_bytes(8, "little") + text + rest

    headers = changed(header).map(as_json)
    files = st.one_of(
        headers.map(whole),
        st.builds(whole, headers, lengths),
        edited([sealed.clean[name][: size + 40]], IN_JSON),
    )

    @fuzz
    @given(files)
    def check(data: bytes) -> None:
        sealed.put(name, data)
        seen.update(outcome(action) is None for action in sealed.everything())
        capsys.readouterr()

    check()
    assert seen == {True, False}
