"""The flags of a task: its options by their own names, and the default task of a
config that names none.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from work_folder import install

from distcore import registry
from distcore.cli.commands.train import changes_of
from distcore.cli.main import command_parser, main
from distcore.cli.task_flags import named_task, task_flags
from distcore.config import RunConfig, load_config
from distcore.errors import ConfigError, StrategyError
from distcore.resolve import tasks

OWN = '''
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True)
class Corners:
    """How many corners."""
    most: int = 4
    """Most of them."""

@dataclass(frozen=True)
class Shapes:
    """Shapes, of a stranger; and more."""
    metrics: ClassVar = {"loss": "min"}
    flags: ClassVar = {"most-corners": "corners.most"}
    round_ones: bool = True
    """Whether there are circles."""
    colors: tuple[str, ...] = ("red",)
    """What they may be."""
    seed: int = 0
    """Has the name of a key of the config."""
    corners: Corners = Corners()
    """How many corners."""
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "shapes.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return "shapes.py:Shapes"


def changes(*argv: str) -> dict[str, object]:
    """Changes that the arguments of ``distcore train`` make in the config."""
    return changes_of(command_parser("train").parse(list(argv)))


def test_each_option_of_a_stranger_is_a_flag_and_so_are_nested_ones_that_it_names(own: str) -> None:
    given = changes(
        "--task",
        own,
        "--round-ones",
        "false",
        "--colors",
        "red,blue",
        "--most-corners=3",
        "--seed",
        "7",
    )
    assert given == {
        "task": own,
        "seed": "7",
        "task_options.round_ones": "false",
        "task_options.colors": ["red", "blue"],
        "task_options.corners.most": "3",
    }
    config = load_config(None, given)
    task = vars(tasks.load_task(config).task)
    assert (task["round_ones"], task["colors"], task["corners"].most, task["seed"]) == (
        False,
        ("red", "blue"),
        3,
        0,
    )
    assert config.seed == 7  # the flag is the config's own


def test_help_shows_the_options_of_the_named_task(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--task", own, "--help", "all"])
    out = capsys.readouterr().out
    assert f"options of the task {own}:" in out
    assert "Shapes, of a stranger. Metrics: loss↓" in out
    assert "--most-corners N" in out
    assert "--set seed=…" not in out.partition("--round-ones")[2]
    assert "--text-column" not in out


def test_the_task_is_that_of_set_before_the_flag_before_the_file(own: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"task: '{own}'\nepochs: 2\n")
    assert named_task(["job.yaml"]) == own
    assert named_task(["job.yaml", "--task", "other"]) == "other"
    assert named_task(["--task", "other", "--set", "task=third"]) == "third"
    assert named_task(["--epochs", "3"]) == "auto"
    (tmp_path / "run").mkdir()
    (tmp_path / "job.yaml").rename(tmp_path / "run/config.yaml")
    assert named_task(["--out", "run", "--resume", "auto"]) == own
    (tmp_path / "run/config.yaml").rename(tmp_path / "job.yaml")
    assert changes("job.yaml", "--round-ones", "false") == {"task_options.round_ones": "false"}


def test_data_of_any_size_is_no_config(tmp_path: Path) -> None:
    """A command line names data like config files, and only the head of a file can be a config."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n' * 500_000)
    before = bytes_read()
    assert named_task(["--data", str(tmp_path / "rows.jsonl")]) == "auto"
    assert bytes_read() - before < 2**21


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_flag_that_the_task_has_not_is_unknown_and_the_nearest_is_named(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--task", own, "--round-one", "true"]) == 2
    assert "unknown flag '--round-one' (did you mean '--round-ones'?)" in capsys.readouterr().err
    assert main(["train", "--task", own, "--text-column", "body"]) == 2
    assert "unknown flag '--text-column'" in capsys.readouterr().err


def test_a_task_that_is_missing_is_named_before_its_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--task", "text-clasification", "--data", "rows.json"]) == 2
    assert "no task named 'text-clasification'" in capsys.readouterr().err


def test_short_keys_are_options_of_the_task_and_nothing_else(own: str) -> None:
    assert RunConfig.model_validate({"task": own, "round_ones": False}).task_options == {
        "round_ones": False
    }
    assert load_config(None, {"task": own, "corners.most": 3}).task_options == {
        "corners": {"most": 3}
    }
    with pytest.raises(
        ConfigError, match=r"command line: unknown key 'round_one' \(did you mean 'round_ones'\?\)"
    ):
        load_config(None, {"task": own, "round_one": 3})
    with pytest.raises(ConfigError, match=r"unknown key 'epoch' \(did you mean 'epochs'\?\)"):
        load_config(None, {"task": own, "epoch": 3})


@pytest.mark.needs("distcore-tasks")
def test_the_default_task_is_what_a_distribution_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.default_task() == "text-classification"
    monkeypatch.setenv("DISTCORE_LOAD_PLUGINS", "")
    with pytest.raises(
        StrategyError,
        match=r"no task is named, .* name one by --task NAME or --task file.py:Class$",
    ):
        registry.default_task()
    with pytest.raises(StrategyError, match="no task is named"):
        tasks.load_task(RunConfig())
    assert RunConfig().task == "auto"


def test_without_a_default_task_help_has_the_flags_of_the_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTCORE_LOAD_PLUGINS", "")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "options of the task" not in capsys.readouterr().out
    assert main(["train", "--quite-another", "x"]) == 2
    assert "no task is named" in capsys.readouterr().err
    assert main(["train", "--epoch", "3"]) == 2
    assert "unknown flag '--epoch' (did you mean '--epochs'?)" in capsys.readouterr().err


@pytest.mark.needs("distcore-tasks")
def test_two_default_tasks_are_refused_and_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "other", "[distcore.default_task]\nmine = other:Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(
        StrategyError, match=r"two distributions have a default one: distcore-tasks .* and other "
    ):
        registry.default_task()


@pytest.mark.needs("distcore-tasks")
def test_the_flags_of_a_task_are_found_without_torch_and_numpy() -> None:
    code = (
        "import sys; from distcore.cli.task_flags import task_flags; task_flags('auto',"
        " ());print([name for name in ('torch', 'numpy', 'transformers', 'rich', 'yaml') if name in"
        " sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_task_has_a_flag_for_each_option_and_each_column() -> None:
    for name in registry.entries("tasks"):
        if not name.endswith(("classification", "lm", "seq2seq")):
            continue
        flags = {flag.name for flag in task_flags(name, ()).flags}
        assert {
            "--model",
            "--data",
            "--eval-data",
            "--test-data",
            "--eval-fraction",
            "--dropout",
        } <= flags
        assert any(flag.endswith("-column") for flag in flags)
