"""``distcore checkpoint export`` gives an exporter the model, its weights and what is known of it, and cleans up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from text_task import TEXTS
from work_folder import install

from distcore import RunConfig
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.provenance import provenance
from distcore.cli.main import main

EXPORTER = """
import json
import os
import torch

def export(trained, to, merged):
    to.mkdir()
    torch.save(trained.module.state_dict(), to / "weights.pt")
    trained.save_task_files(to)
    facts = {"strategy": trained.config.strategy, "average": trained.is_average, "merged": merged}
    (to / "facts.json").write_text(json.dumps({**trained.provenance, **facts}))
    if os.environ.get("FULL"):
        raise OSError(28, "No space left on device")
"""


pytestmark = pytest.mark.needs("distcore-workbench")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two steps with a moving average; not to be written to."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "rows.json").write_text(json.dumps([[f"word {number % 5}", number % 2] for number in range(20)]))
    job = f"--task {TEXTS} --data {folder}/rows.json --max-steps 2 --set ema.decay=0.5 --set extensions.progress=false"
    assert main(f"train {job} --set device=cpu --out {folder}/run".split()) == 0
    return folder / "run"


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter of another distribution, with that of distcore-tasks blocked."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "own_exporter.py").write_text(EXPORTER)
    install(site, "own-exporter", "[distcore.exports]\nhuggingface = own_exporter:export\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("DISTCORE_BLOCK_PLUGINS", "distcore-tasks")
    monkeypatch.delitem(sys.modules, "own_exporter", raising=False)


def test_an_exporter_gets_the_weights_that_are_evaluated_and_what_is_known_of_them(
    trained: Path, stranger: None, tmp_path: Path
) -> None:
    assert main(["checkpoint", "export", str(trained), "--to", str(tmp_path / "model")]) == 0
    weights = torch.load(tmp_path / "model/weights.pt", weights_only=True)
    saved = Checkpoint(trained / "checkpoints/step-00000002")
    averages = {name.removeprefix("ema/"): saved[name] for name in saved if name.startswith("ema/")}
    assert averages
    assert all(torch.equal(weights[name], value) for name, value in averages.items())
    facts = json.loads((tmp_path / "model/facts.json").read_text())
    assert (facts["steps"], facts["strategy"], facts["average"], facts["merged"]) == ("2", "single", True, False)


def test_what_an_exporter_could_not_write_is_one_line_and_leaves_nothing(
    trained: Path, stranger: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FULL", "1")
    assert main(["checkpoint", "export", str(trained), "--to", str(tmp_path / "model")]) == 2
    [*_, line] = capfd.readouterr().err.splitlines()
    assert line == f"error: --to {tmp_path}/model: cannot be written: No space left on device"
    assert not (tmp_path / "model").exists()


def test_without_the_exporter_one_line_says_so(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTCORE_BLOCK_PLUGINS", "distcore-tasks")
    assert main(["checkpoint", "export", str(trained), "--to", str(tmp_path / "model")]) == 2
    [*_, line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "exporter" in line
    assert "'huggingface'" in line
    assert not (tmp_path / "model").exists()


def test_a_file_is_no_folder_to_export_to(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").touch()
    assert main(["checkpoint", "export", str(trained), "--to", str(tmp_path / "model")]) == 2
    assert f"error: --to {tmp_path}/model: is a file, expected a folder to make\n" in capfd.readouterr().err


def test_a_card_names_the_versions_that_trained_and_not_those_that_export(tmp_path: Path) -> None:
    state = {"progress": {"step": 3}, "data": "0" * 64, "environment": {"python": "3.11.0", "torch": "2.6.0"}}
    known = provenance("BertModel", state, RunConfig(nproc=2), tmp_path)
    assert known["environment"] == "python 3.11.0, torch 2.6.0"
    assert known["rows"] == "number of rows not reported"
