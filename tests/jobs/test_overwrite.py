"""``--overwrite``: a run begins anew in a folder that is in use, and the earlier run stays whole
beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset
from user_file import task_file
from work_folder import install

from distcore import ConfigError, RunConfig, Session, train
from distcore.cli.main import main
from distcore.files import lock_shared
from distcore.launchers import LaunchSpec, train_command
from distcore.resolve import run_folder
from distcore.testing.problem import Problem

JOB: dict[str, Any] = {"device": "cpu", "lr": 0.1, "extensions": {"progress": False}}


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file of a run, by its name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files of a finished run of three steps, in ``run``."""
    monkeypatch.chdir(tmp_path)
    train(RunConfig(**JOB, out="run", max_steps=3), Problem())
    return contents(Path("run"))


def test_the_earlier_run_is_set_aside_whole_and_nothing_of_it_is_mixed_in(
    finished: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # As in a script, which pytest is not.
    monkeypatch.setattr("logging.Logger.hasHandlers", lambda log: False)
    for number in (1, 2):
        report = train(RunConfig(**JOB, out="run", max_steps=2, overwrite=True), Problem())
        assert report["steps"] == 2
        assert f"out = 'run': the earlier run is now run.old-{number}\n" in capfd.readouterr().err
    assert contents(Path("run.old-1")) == finished
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000002"]
    assert "overwrite" not in yaml.safe_load(Path("run/config.yaml").read_text())


def test_a_folder_that_is_not_there_is_begun_as_always(tmp_path: Path) -> None:
    out = tmp_path / "new"
    train(RunConfig(**JOB, out=str(out), max_steps=1, overwrite=True), Problem())
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


class Broken(Problem):
    """A task without a model."""

    def build_model(self, *_: object) -> Any:
        """Fail as code of a user does."""
        raise ConfigError("no model")


def test_a_start_that_fails_moves_nothing(
    finished: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(**JOB, out="run", max_steps=2, overwrite=True)
    with pytest.raises(ConfigError, match="no model"):
        train(config, Broken())
    held = lock_shared(Path("run/config.yaml"))
    assert held
    monkeypatch.setattr(run_folder, "LINGERING", 0.2)
    with pytest.raises(ConfigError, match="another process is training this run; end it first"):
        train(config, Problem())
    held.close()
    assert contents(Path("run")) == finished
    assert [path.name for path in Path.cwd().iterdir()] == ["run"]


@pytest.mark.parametrize("resume", ["auto", "run/checkpoints/step-00000003"])
def test_to_begin_anew_and_to_go_on_exclude_each_other(
    finished: dict[str, bytes], resume: str
) -> None:
    config = RunConfig(**JOB, out="run", max_steps=4, overwrite=True, resume=resume)
    with pytest.raises(ConfigError, match=r"^--overwrite begins anew, and --resume .* goes on"):
        train(config, Problem())
    assert contents(Path("run")) == finished


def test_ranks_that_torchelastic_starts_again_do_not_set_their_own_run_aside(
    finished: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(ConfigError, match="holds another run; choose another, set it aside"):
        train(RunConfig(**JOB, out="run", max_steps=2, overwrite=True), Problem())
    assert contents(Path("run")) == finished


def test_the_current_folder_is_not_set_aside(
    finished: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("run")
    with pytest.raises(ConfigError, match="the current folder cannot be set aside"):
        train(RunConfig(**JOB, out=".", max_steps=2, overwrite=True), Problem())
    assert contents(Path.cwd()) == finished


def test_a_loop_of_the_user_s_own_begins_anew_too(finished: dict[str, bytes]) -> None:
    config = RunConfig(**JOB, out="run", max_steps=1, overwrite=True)
    with Session(config, lambda: nn.Linear(1, 1), TensorDataset(torch.ones(40, 1))) as session:
        for step in session:
            step.gradients(lambda model, batch: model(batch[0]).sum())
            step.apply()
    assert contents(Path("run.old-1")) == finished


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_several_ranks_set_it_aside_once_and_restarts_go_on_in_the_new_one(
    finished: dict[str, bytes],
) -> None:
    text = task_file(
        "once = __import__('pathlib').Path('once')\n"
        "if torch.is_grad_enabled() and Path_of_first.exists() and not once.exists():\n"
        "    once.touch()\n"
        "    raise ValueError('no')\n"
        "return model(batch[0])[:, 0] ** 2"
    ).replace("Path_of_first", "__import__('pathlib').Path('run/checkpoints/step-00000001')")
    Path("own.py").write_text(text)
    ranks = ["--strategy", "ddp", "--nproc", "2", "--max-restarts", "1", "--save-every", "1"]
    job = ["--task", "own.py:Own", "--device", "cpu", "--lr", "0.1", "--max-steps", "4"]
    assert main(["train", *job, *ranks, "--out", "run", "--overwrite"]) == 0
    assert Path("once").exists()
    assert contents(Path("run.old-1")) == finished
    assert sorted(path.name for path in Path.cwd().glob("run*")) == ["run", "run.old-1"]
    assert max(Path("run/checkpoints").iterdir()).name == "step-00000004"


def test_a_launcher_is_given_a_folder_that_is_free() -> None:
    words = train_command(LaunchSpec(train=("--overwrite",), overwrite=True))
    assert words[-2:] == ("--set", "overwrite=false")


class Elsewhere:
    """A launcher that starts nothing."""

    def plan(self, spec: LaunchSpec) -> object:
        """Return the request as the plan."""
        assert spec.overwrite
        assert not spec.here.out_exists
        return spec

    def run(self, plan: object) -> int:
        """Look at the folder, and end."""
        return 0 if not Path("run").exists() else 1


@pytest.mark.parametrize("dry", [True, False])
def test_the_run_is_set_aside_before_a_launcher_starts_ranks_and_not_by_a_dry_run(
    finished: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, dry: bool
) -> None:
    entry = f"[distcore.launchers]\nelsewhere = {__name__}:Elsewhere\n"
    install(Path.cwd(), "launchers-from-elsewhere", entry)
    monkeypatch.syspath_prepend(Path.cwd())
    more = ["--dry-run"] if dry else []
    command = ["train", "--launcher", "elsewhere", "--out", "run", "--overwrite", *more]
    assert main(command) == 0
    assert contents(Path("run" if dry else "run.old-1")) == finished
