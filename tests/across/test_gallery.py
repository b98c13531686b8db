"""The gallery: its examples are short, keep the laws of their kinds, and do
what their sources say.
"""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distcore import DataError, load_config, train
from distcore.checkpoint import Checkpoint, find
from distcore.launchers import Here, LaunchSpec

ROOT = Path(__file__).parents[2]
MARKS = {
    "strategy-localsgd": [],  # its own contract measures it
    "task-diffusion": [pytest.mark.programs],
    "optimizer-adan": [pytest.mark.ranks],
    "tracker-sqlite": [pytest.mark.ranks, pytest.mark.slow],
    "reader-sqlite": [pytest.mark.programs],
    "launcher-queue": [pytest.mark.ranks, pytest.mark.slow],
    "extension-gradientnoise": [pytest.mark.ranks, pytest.mark.slow],
    "extension-nanguard": [pytest.mark.ranks, pytest.mark.slow],
}


def module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"gallery_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TOOL = module_of(ROOT / "tools/gallery.py")


def example(folder: str) -> Any:
    return module_of(TOOL.file_of(folder))


def test_the_page_has_every_example_with_what_it_says_of_itself() -> None:
    page = TOOL.PAGE.read_text()
    assert page == TOOL.with_list(page), "run tools/gallery.py"
    assert f"at most {TOOL.MOST} lines" in page
    assert TOOL.PLUGINS.keys() == {
        path.parent.name for path in ROOT.glob("examples/*-*/README.md")
    } - {"own-steps"}


@pytest.mark.parametrize("folder", TOOL.PLUGINS)
def test_an_example_is_short(folder: str) -> None:
    assert TOOL.code_lines(TOOL.file_of(folder)) <= TOOL.MOST


@pytest.mark.parametrize(
    "folder", [pytest.param(folder, marks=MARKS[folder]) for folder in TOOL.PLUGINS]
)
def test_an_example_keeps_the_laws_of_its_kind(folder: str) -> None:
    findings = TOOL.measure(folder)
    assert [str(finding) for finding in findings if finding.held is False] == []
    assert findings or folder == "strategy-localsgd"


def test_adan_steps_as_the_paper_says() -> None:
    """Algorithm 1 by its equations, with its betas, which are 1 minus those of the
    options, and corrected means.
    """
    rate, decay, eps, steps = 0.01, 0.1, 1e-8, 7
    draw = np.random.default_rng(0)
    weights, gradients = draw.normal(size=5), draw.normal(size=(steps, 5))
    parameter = nn.Parameter(torch.tensor(weights))
    optimizer = (
        example("optimizer-adan")
        .Adan(weight_decay=decay, eps=eps)
        .build(nn.Module(), [{"params": [parameter], "lr": rate, "weight_decay": decay}])
    )
    b1, b2, b3 = 0.02, 0.08, 0.01
    m = v = n = np.zeros(5)
    for k, gradient in enumerate(gradients, start=1):
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        difference = gradient - gradients[k - 2] if k > 1 else np.zeros(5)
        m = (1 - b1) * m + b1 * gradient
        v = (1 - b2) * v + b2 * difference
        n = (1 - b3) * n + b3 * (gradient + (1 - b2) * difference) ** 2
        size = rate / (np.sqrt(n / (1 - (1 - b3) ** k)) + eps)
        move = m / (1 - (1 - b1) ** k) + (1 - b2) * v / (1 - (1 - b2) ** k)
        weights = (weights - size * move) / (1 + decay * rate)
    np.testing.assert_allclose(parameter.detach().numpy(), weights, rtol=1e-6)


@pytest.mark.programs
def test_the_curves_of_a_run_and_of_its_resume_are_those_of_its_log(tmp_path: Path) -> None:
    points = module_of(ROOT / "plugins/workbench/distcore_workbench/kits/points.py")
    keys = {
        "max_steps": 4,
        "save_every": 2,
        "eval_every": 2,
        "log_every": 1,
        "global_batch_size": 8,
        "device": "cpu",
    }
    keys |= {"checkpoints.keep_last": 4, "out": str(tmp_path / "run")}
    keys |= {f"extensions.{TOOL.file_of('tracker-sqlite')}:Curves.file": "../all.sqlite"}
    train(load_config(None, keys), points.Points())
    written = curves(tmp_path)
    log = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = {
        (line["step"], "train/loss"): line["train/loss"] for line in log if "train/loss" in line
    }
    assert losses
    assert {key: value for key, value in written.items() if key[1] == "train/loss"} == losses
    assert {step for step, name in written if name == "eval/loss"} >= {2, 4}
    with closing(sqlite3.connect(tmp_path / "all.sqlite")) as database, database:
        database.execute(
            "INSERT INTO curves VALUES ('run', 4, 'train/lost', 0), ('other', 9, 'train/loss', 0)"
        )
    train(
        load_config(None, keys | {"resume": str(tmp_path / "run/checkpoints/step-00000002")}),
        points.Points(),
    )
    again = curves(tmp_path)
    assert (4, "train/lost") not in again
    assert {name: again[name] for name in losses} == losses
    with closing(sqlite3.connect(tmp_path / "all.sqlite")) as database:
        assert database.execute("SELECT step FROM curves WHERE run = 'other'").fetchall() == [(9,)]


def curves(folder: Path) -> dict[tuple[int, str], float]:
    with closing(sqlite3.connect(folder / "all.sqlite")) as database:
        rows = database.execute("SELECT step, name, value FROM curves WHERE run = 'run'").fetchall()
    return {(step, name): value for step, name, value in rows}


def test_a_database_is_read_by_table_and_by_view(tmp_path: Path) -> None:
    reader = example("reader-sqlite").Sqlite()
    file = reader.sample(
        tmp_path,
        [{"text": "one", "count": 1, "share": 0.5}, {"text": "two", "count": 2, "share": 1}],
    )
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE VIEW last AS SELECT text FROM rows ORDER BY count DESC")
    columns = {"columns.text": "text"}
    with pytest.raises(
        DataError, match=r"name one of its tables, as in rows\.db\?TABLE: rows, last$"
    ):
        list(reader.read(file, columns))
    assert list(reader.read(Path(f"{file}?last"), columns)) == [("two",), ("one",)]
    assert list(reader.read(Path(f"{file}?rows"), columns)) == [("one",), ("two",)]
    assert list(reader.read(Path(f"{file}?rows"), {})) == [(), ()], "to count them"
    assert reader.digest(Path(f"{file}?rows")) != reader.digest(Path(f"{file}?last"))


WORK = (
    "import pathlib, time; log = pathlib.Path({log!r}).open('a')\nfor word in 'begun', 'ended':\n"
)
WORK += "    log.write(word + '\\n'); log.flush(); time.sleep(0.3)"


@pytest.mark.programs
def test_runs_of_a_queue_follow_each_other(tmp_path: Path) -> None:
    here = Here(folder=str(tmp_path), python=sys.executable)
    (command,) = (
        example("launcher-queue")
        .Queue()
        .plan(LaunchSpec(value=str(tmp_path / "lock"), here=here))
        .commands
    )
    lock = command.words[: command.words.index(sys.executable)]
    log = tmp_path / "log"
    runs = [
        subprocess.Popen([*lock, sys.executable, "-c", WORK.format(log=str(log))]) for _ in range(3)
    ]
    began = time.monotonic()
    runs[0].kill()  # whoever dies frees the lock
    assert [run.wait(timeout=30) for run in runs[1:]] == [0, 0]
    assert log.read_text().split()[-4:] == ["begun", "ended"] * 2
    assert time.monotonic() - began > 0.6


@pytest.mark.slow
def test_diffusion_draws_what_is_nearer_to_digits_than_noise_is(tmp_path: Path) -> None:
    diffusion = example("task-diffusion")
    keys = {
        "max_steps": 400,
        "global_batch_size": 128,
        "device": "cpu",
        "out": str(tmp_path),
        "log_every": 200,
    }
    report = train(load_config(None, keys | {"eval_at_epoch_end": False}), diffusion.Diffusion())
    assert report["evaluation"]["loss"] < 0.4  # 1 if the network said nothing
    model, path = diffusion.Diffusion().model(), find("auto", tmp_path)
    assert path is not None
    saved = Checkpoint(path)
    model.load_state_dict(
        {name.partition("/")[2]: saved[name] for name in saved if name.startswith("model/")}
    )
    images = diffusion.draw(model, 32, 100, torch.Generator().manual_seed(0))
    digits = diffusion.Diffusion().data()[0].images
    near, far = (
        torch.cdist(each, digits).min(1).values.mean() for each in (images, torch.randn(32, 64))
    )
    assert near < 0.6 * far
