"""The same rows in JSON lines and in shards of every form train the same weights, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import shard_cases as shards

from distcore import RunConfig, train

pytestmark = pytest.mark.programs
ROWS = [{"text": f"{word} thing number {number}", "label": number % 2}
        for number, word in enumerate(["bad", "good"] * 12)]  # fmt: skip


def config(data: Path, out: Path) -> RunConfig:
    options = {
        "data": str(data),
        "model": "bert-tiny",
        "max_seq_len": 16,
        "tokenizer": {"vocab_size": 120},
    }
    return RunConfig(
        task_options=options, device="cpu", max_steps=2, global_batch_size=8, lr=1e-3, out=str(out),
        extensions={"progress": False},
    )  # fmt: skip


def weights(out: Path) -> dict[str, bytes]:
    """Return the files of weights and optimizer in the last checkpoint."""
    last = max((out / "checkpoints").iterdir())
    files = [
        file
        for file in last.rglob("*")
        if file.suffix in (".safetensors", ".distcp", ".pt", ".bin")
    ]
    assert files, list(last.rglob("*"))
    return {str(file.relative_to(last)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def as_lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights after two steps on JSON lines."""
    folder = tmp_path_factory.mktemp("lines")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTCORE_CACHE", str(folder / "cache"))
        train(config(folder / "rows.jsonl", folder / "run"))
    return weights(folder / "run")


@pytest.mark.parametrize("form", ["tar", "mds", "mds zstd", "litdata", "arrow stream"])
def test_the_same_rows_train_the_same_weights(
    as_lines: dict[str, bytes], tmp_path: Path, form: str
) -> None:
    train(config(shards.written(tmp_path / "rows", form, ROWS), tmp_path / "run"))
    assert weights(tmp_path / "run") == as_lines
