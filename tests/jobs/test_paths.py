"""A run is found again from any folder, whatever the paths looked like that it was started with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from work_folder import enter, write_rows

from distcore.cli.main import main
from distcore.files import absolute, same_place

pytestmark = pytest.mark.programs

TASK = """
from distcore_tasks.text_classification.task import TextClassification

class Mine(TextClassification):
    pass
"""
WATCH = (
    "from distcore import hookimpl\nclass Watch:\n    @hookimpl\n    def on_step_end(self): pass\n"
)
JOB = (
    "--task mine.py:Mine --data rows.json --model ./tiny --max-steps 4 --save-every 2 --set"
    " device=cpu"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in ``runs/x``: its data, its model, its task and an extension
    are files beside ``runs``.
    """
    folder = tmp_path_factory.mktemp("project")
    write_rows(folder)
    (folder / "mine.py").write_text(TASK)
    (folder / "watch.py").write_text(WATCH)
    with pytest.MonkeyPatch.context() as patch:
        enter(folder, patch)
        first = (
            "--data rows.json --model bert-tiny --max-steps 1 --max-seq-len 16 --set device=cpu"
            " --out first"
        )
        assert main(["train", *first.split()]) == 0
        assert main(["checkpoint", "export", "first", "--to", "tiny"]) == 0
        job = (
            f"{JOB} --max-seq-len 16 --set extensions.watch.py:Watch=true --set"
            " checkpoints.best=null --out runs/x"
        )
        assert main(["train", *job.split()]) == 0
    return folder


@pytest.fixture
def elsewhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder, which is the current one; the cache is the project's."""
    enter(tmp_path, monkeypatch)
    monkeypatch.setenv("DISTCORE_CACHE", str(project / "cache"))
    return tmp_path


@pytest.mark.needs("distcore-tasks", "distcore-workbench")
def test_a_run_is_evaluated_exported_and_trained_again_from_another_folder(
    project: Path, elsewhere: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = project / "runs/x"
    assert main(["eval", str(run), "--json"]) == 0
    loss = json.loads(capfd.readouterr().out.splitlines()[-1])["evaluation"]["loss"]
    assert loss == pytest.approx(
        json.loads((run / "report.json").read_text())["evaluation"]["loss"], rel=1e-5
    )
    assert main(["checkpoint", "export", str(run), "--to", "exported"]) == 0
    assert main(["train", str(run / "config.yaml"), "--out", "again", "--dry-run"]) == 0


@pytest.mark.needs("distcore-tasks", "distcore-workbench")
def test_a_run_that_was_moved_alone_goes_on(project: Path, elsewhere: Path) -> None:
    moved = Path(shutil.copytree(project / "runs/x", elsewhere / "moved"))
    shutil.rmtree(moved / "checkpoints/step-00000004")
    assert main(["train", "--out", "moved", "--resume", "auto"]) == 0
    assert (moved / "checkpoints/step-00000004").is_dir()


@pytest.mark.needs("distcore-tasks", "distcore-workbench")
def test_a_run_whose_files_have_moved_goes_on_where_they_are_named_again(
    project: Path, elsewhere: Path
) -> None:
    for name in ("rows.json", "mine.py"):
        shutil.copy(project / name, elsewhere)
    shutil.copytree(project / "tiny", elsewhere / "tiny")
    run = shutil.copytree(project / "runs/x", elsewhere / "runs/x")
    shutil.rmtree(run / "checkpoints/step-00000004")
    assert main(["train", *JOB.split(), "--out", "runs/x", "--resume", "auto"]) == 0
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    assert recorded["task"] == f"{elsewhere}/mine.py:Mine"
    assert recorded["task_options"]["data"] == f"{elsewhere}/rows.json"
    assert recorded["task_options"]["model"] == f"{elsewhere}/tiny"


@pytest.mark.needs("distcore-tasks", "distcore-workbench")
def test_a_built_in_name_is_no_path_though_a_folder_has_it(work_folder: Path) -> None:
    (work_folder / "bert-tiny").mkdir()
    job = "--data rows.json --model bert-tiny --max-steps 1 --set device=cpu --out run"
    assert main(["train", *job.split()]) == 0
    options = yaml.safe_load((work_folder / "run/config.yaml").read_text())["task_options"]
    assert (options["model"], options["data"]) == ("bert-tiny", f"{work_folder}/rows.json")


def test_a_path_that_is_there_becomes_absolute(work_folder: Path) -> None:
    (work_folder / "mine.py").touch()
    given = (
        "rows.json",
        "./rows.json",
        "mine.py:Mine",
        "none.json",
        "~/rows.json",
        "org/model",
        "/",
    )
    assert [absolute(path) for path in given] == [
        *[f"{work_folder}/rows.json"] * 2,
        f"{work_folder}/mine.py:Mine",
        "none.json",
        "~/rows.json",
        "org/model",
        "/",
    ]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("./tiny", "/a/tiny", True),
        ("/a/mine.py:Mine", "/b/mine.py:Mine", True),
        ("/a/tiny", "/b/tiny/", True),
        ("a/tiny", "b/tiny", False),
        ("/a/tiny", "/a/mini", False),
        ("bert-tiny", "bert-mini", False),
        (3, 3, True),
    ],
)
def test_a_path_is_the_same_by_its_name_where_its_folder_is_known(
    one: object, other: object, same: bool
) -> None:
    assert same_place(one, other) is same
