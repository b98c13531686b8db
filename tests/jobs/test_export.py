"""``distcore checkpoint export`` gives an exporter the model, its weights and what is known of
it, and cleans up.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from text_task import TEXTS
from torch import nn
from work_folder import install

from distcore import RunConfig
from distcore.checkpoint import Checkpoint
from distcore.checkpoint.provenance import provenance
from distcore.cli.main import main
from distcore.engine.precision import DTYPES
from distcore.errors import CheckpointError
from distcore.jobs.export import cast, round_to

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

PROVER = """
import copy
import os
import torch

def export(trained, to, merged):
    to.mkdir()
    trained.prove("a reader", lambda: read_back(trained.module), drawn=drawn)

def read_back(module):
    match os.environ["READS"]:
        case "without-library":
            raise ImportError("a library is not installed")
        case "nothing":
            raise ValueError("no magic number")
    again = copy.deepcopy(module)
    if os.environ["READS"] == "another":
        again.classifier.bias.data += torch.tensor([1.0, 0.0])
    return again

def drawn():
    return {"input_ids": torch.arange(6)[None], "attention_mask": torch.ones(1, 6)}
"""

pytestmark = pytest.mark.needs("distcore-workbench")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two steps with a moving average; not to be written to."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "rows.json").write_text(
        json.dumps([[f"word {number % 5}", number % 2] for number in range(20)])
    )
    job = (
        f"--task {TEXTS} --data {folder}/rows.json --max-steps 2 --set ema.decay=0.5 --set"
        " extensions.progress=false"
    )
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


@pytest.fixture
def prover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An exporter that writes nothing, and reads back what ``READS`` says."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "proving_exporter.py").write_text(PROVER)
    install(site, "proving-exporter", "[distcore.exports]\nproving = proving_exporter:export\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "proving_exporter", raising=False)
    return "proving"


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
    assert (facts["steps"], facts["strategy"], facts["average"], facts["merged"]) == (
        "2",
        "single",
        True,
        False,
    )


def test_an_export_that_could_not_be_written_is_one_line_and_leaves_nothing(
    trained: Path,
    stranger: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FULL", "1")
    assert main(["checkpoint", "export", str(trained), "--to", str(tmp_path / "model")]) == 2
    [*_, line] = capfd.readouterr().err.splitlines()
    assert line == f"error: --to {tmp_path}/model: cannot be written: No space left on device"
    assert not (tmp_path / "model").exists()


def test_without_the_exporter_one_line_says_so(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DISTCORE_BLOCK_PLUGINS", "distcore-tasks")
    assert main(["checkpoint", "export", str(trained), "--to", str(tmp_path / "model")]) == 2
    [*_, line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "exporter" in line
    assert "'huggingface'" in line
    assert not (tmp_path / "model").exists()


def test_a_file_is_no_folder_to_export_to(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").touch()
    assert main(["checkpoint", "export", str(trained), "--to", str(tmp_path / "model")]) == 2
    assert (
        f"error: --to {tmp_path}/model: is a file, expected a folder to make\n"
        in capfd.readouterr().err
    )


def test_a_card_names_the_versions_that_trained_and_not_those_that_export(tmp_path: Path) -> None:
    state = {
        "progress": {"step": 3},
        "data": "0" * 64,
        "environment": {"python": "3.11.0", "torch": "2.6.0"},
    }
    known = provenance("BertModel", state, RunConfig(nproc=2), tmp_path)
    assert known["environment"] == "python 3.11.0, torch 2.6.0"
    assert known["rows"] == "number of rows not reported"


@pytest.mark.parametrize(
    ("reads", "code", "says"),
    [
        (
            "the-model",
            0,
            r"by a reader, its loss on \d evaluation rows is (\d\.\d+); that of the run is \1\.",
        ),
        (
            "another",
            2,
            (
                "error: the export is not the model of the run: what a reader reads back has other"
                " losses of a"
            ),
        ),
        (
            "nothing",
            2,
            (
                "error: the export cannot be used by a reader: ValueError: no magic number; nothing"
                " of it"
            ),
        ),
        (
            "without-library",
            0,
            "It was not compared with the model of the run by a reader: a library is not installed",
        ),
    ],
)
def test_an_export_is_proved_by_its_loss_on_rows_of_the_run(
    trained: Path,
    prover: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    reads: str,
    code: int,
    says: str,
) -> None:
    monkeypatch.setenv("READS", reads)
    command = ["checkpoint", "export", str(trained), "--to", str(tmp_path / "model")]
    command += ["--format", prover]
    assert main(command) == code
    *_, line = capfd.readouterr().err.splitlines()
    assert re.search(says, line), line
    assert (tmp_path / "model").exists() == (code == 0)


def test_an_export_whose_data_have_changed_is_proved_by_drawn_inputs(
    trained: Path,
    prover: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = trained.parent / "rows.json"
    before = data.read_text()
    data.write_text(json.dumps([[f"word {number % 5}", (number + 1) % 2] for number in range(20)]))
    command = ["checkpoint", "export", str(trained), "--format", prover, "--to"]
    try:
        monkeypatch.setenv("READS", "the-model")
        assert main([*command, str(tmp_path / "right")]) == 0
        said = capfd.readouterr().err
        assert (
            "answers drawn inputs as the model of the run does; its loss was not measured: the"
            " data of" in said
        )
        monkeypatch.setenv("READS", "another")
        assert main([*command, str(tmp_path / "wrong")]) == 2
    finally:
        data.write_text(before)
    assert (
        "has other answers to drawn inputs (a difference of 1, at most 0.0002 is rounding)"
        in capfd.readouterr().err
    )
    assert not (tmp_path / "wrong").exists()


def test_an_exporter_that_proves_nothing_is_said(
    trained: Path, stranger: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "export", str(trained), "--to", str(tmp_path / "model")]) == 0
    assert "does not read back what it writes, so nothing proves it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "value", "says"),
    [
        (
            "fp16",
            1e5,
            (
                "0.weight has a value of 1e+05, and fp16 ends at 6.55e+04: .*; take --dtype bf16,"
                " or leave out"
            ),
        ),
        (
            "bf16",
            3.4e38,
            (
                "0.weight has a value of 3.4e+38, and bf16 ends at 3.39e+38: .*; leave out --dtype"
                " for fp32"
            ),
        ),
    ],
)
def test_a_cast_that_makes_an_infinity_is_refused_by_name(
    dtype: str, value: float, says: str
) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("frequencies", torch.tensor([value, 1 / 3]), persistent=False)
    round_to(module, dtype)
    cast(module, DTYPES[dtype])
    assert {each.dtype for each in module.state_dict().values() if each.is_floating_point()} == {
        DTYPES[dtype]
    }
    # no file has it
    assert torch.equal(module.get_buffer("frequencies"), torch.tensor([value, 1 / 3]))

    module = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        next(module.parameters())[0, 1] = value
    with pytest.raises(CheckpointError, match=says.replace("+", r"\+")):
        round_to(module, dtype)
