"""Training data of an HTTP server: the run of a local file, at two ranks, refused on
resume after a change.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from distcore import DataError, RunConfig, launch, train
from distcore.cli.main import main
from distcore_data import cache_root, remote

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
pytestmark = pytest.mark.programs  # its runs are whole ones
ROWS = [{"text": f"after {row} comes {row + 1}", "label": "ab"[row % 2]} for row in range(60)]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL of a data file, and the file."""
    file = tmp_path / "served" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(file.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        remote.copies_of.cache_clear()
        yield f"http://127.0.0.1:{server.server_port}/rows.jsonl", file
        server.shutdown()


def config(folder: Path, out: str, data: object, **changes: Any) -> RunConfig:
    tree = {
        "task": "text-classification",
        "out": str(folder / out),
        "max_steps": 4,
        "global_batch_size": 8,
        "lr": 0.001,
        "micro_batch_size": 4,
        "log_every": 1,
        "device": "cpu",
        "extensions": {"progress": False},
        "schedule": {"name": "constant"},
    }
    options = {"model": "bert-tiny", "data": str(data), "max_seq_len": 24, "dropout": 0.0}
    return RunConfig.model_validate(tree | changes | {"task_options": options})


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_ranks_train_on_a_remote_file_as_one_process_on_a_local_one(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    url, file = served
    train(config(tmp_path, "local", file))
    launch(train, config(tmp_path, "remote", url, nproc=2, strategy="ddp"), nproc=2)
    assert losses(tmp_path / "remote") == pytest.approx(losses(tmp_path / "local"), rel=1e-5)
    assert url in (tmp_path / "remote" / "config.yaml").read_text()


def test_a_resume_goes_on_without_fetching_rows_again(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    url, _ = served
    train(config(tmp_path, "run", url, max_steps=2))
    shutil.rmtree(cache_root() / "remote")
    remote.copies_of.cache_clear()
    train(config(tmp_path, "run", url, resume="auto", resume_changed=["total_steps"]))
    assert not list((cache_root() / "remote").glob("*/*"))


def test_a_changed_remote_file_is_refused_on_resume(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    url, file = served
    train(config(tmp_path, "run", url, max_steps=2))
    going_on = config(tmp_path, "run", url, resume="auto", resume_changed=["total_steps"])
    file.write_text(file.read_text().replace("after 7", "after 9"))  # of the same size
    os.utime(file, (1_000_000_000, 1_000_000_000))
    remote.copies_of.cache_clear()
    with pytest.raises(
        DataError,
        match=r"rows.jsonl: has changed on resume: rows 1 to 60 of data; put back what was",
    ):
        train(going_on)


def test_rows_are_predicted_from_a_url(served: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = served
    train(config(tmp_path, "run", url, max_steps=2))
    command = ["predict", str(tmp_path / "run"), "--data", url]
    command += ["--out", str(tmp_path / "out.jsonl")]
    assert main(command) == 0
    lines = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    assert len(lines) == len(ROWS)
