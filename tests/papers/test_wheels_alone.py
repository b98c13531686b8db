"""Each distribution from its wheel, in an environment with the core, what it requires of ours, and
no other of ours.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from alone import CORE, PLUGINS, make_environment, required
from first_line import after_first_line

BESIDE = ("clusters", "data", "migrate", "optimizers", "tasks", "workbench")
"""Those that ``distcore`` needs beside the core."""
WITHOUT = ("transformers", "tokenizers", "datasets", "sklearn")
"""Packages that only tasks need."""
IMPORT_ALL = """
import importlib, pkgutil, sys
package, absent = importlib.import_module(sys.argv[1]), sys.argv[2:]
walked = pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=print)
modules = [found.name for found in walked]
for name in modules:
    try:
        name.endswith("__main__") or importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":  # too large to be installed for tests
            raise
assert not [name for name in absent if importlib.util.find_spec(name)], absent
assert not [name for name in absent if name in sys.modules]
print(len(modules))
"""
EXPORT = """
from pathlib import Path
from distcore.checkpoint import checkpoints_in
from distcore.lab import export_checkpoint
(newest,) = checkpoints_in(Path("run/checkpoints"))
export_checkpoint(newest, Path("model"), None, False, "huggingface", "fp32")
"""
OWN_TASK = """
import torch
from torch.utils.data import TensorDataset
from distcore import Simple

class Line(Simple):
    def data(self):
        points = torch.linspace(-1, 1, 40).unsqueeze(1)
        rows = TensorDataset(points, 3 * points)
        return rows, rows

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))

    def row_loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().sum(1)
"""

pytestmark = [pytest.mark.programs, pytest.mark.timeout(900)]


def package(folder: Path) -> str:
    return "distcore" if folder == CORE else f"distcore_{folder.name}"


def wheel(distributions: Path, name: str) -> str:
    return str(distributions / f"{name}-{version(name)}-py3-none-any.whl")


def installed(distributions: Path, home: Path, folder: Path, *without: str) -> Path:
    """The interpreter of an environment with the wheels of a distribution and of what
    it requires of ours.
    """
    names = (f"distcore_{part.name}" for part in required(folder))
    return make_environment(home, (wheel(distributions, name) for name in names), without)


def run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def core_alone(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the core's wheel and no other of ours."""
    return installed(distributions, tmp_path_factory.mktemp("core") / "environment", CORE)


@pytest.fixture(scope="module")
def core_and_hints(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the core's wheel and that of ``distcore``, without
    what that depends on.
    """
    home = tmp_path_factory.mktemp("hints") / "environment"
    names = ("distcore_core", "distcore")
    return make_environment(home, [wheel(distributions, name) for name in names])


@pytest.mark.parametrize(
    "folder",
    [pytest.param(folder, marks=pytest.mark.slow, id=folder.name) for folder in PLUGINS],
)
def test_every_module_of_a_wheel_is_imported_beside_the_core(
    distributions: Path, tmp_path: Path, folder: Path
) -> None:
    python = installed(distributions, tmp_path / "environment", folder)
    absent = [package(other) for other in PLUGINS if other not in required(folder)]
    done = run(python, tmp_path, "-c", IMPORT_ALL, package(folder), *absent)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(list((folder / package(folder)).rglob("*.py"))) // 2


def test_every_module_of_the_core_is_imported_with_nothing_beside_it(
    core_alone: Path, tmp_path: Path
) -> None:
    done = run(core_alone, tmp_path, "-c", IMPORT_ALL, "distcore", *map(package, PLUGINS))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_the_core_alone_lists_what_it_has_and_names_no_other_distribution(
    core_alone: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN_TASK)
    lines = {
        "compare": "no command named 'compare' (commands: train, eval, predict, strategies, tasks,"
        " check, checkpoint)",
        "train --strategy fsdp --task own.py:Line": "no strategy named 'fsdp' (installed: single)",
    }
    for command, line in lines.items():
        done = run(core_alone, tmp_path, "-m", "distcore", *command.split())
        assert (done.returncode, done.stdout) == (2, "")
        assert after_first_line(done.stderr) == f"error: {line}\n"


def test_the_core_and_the_hints_name_the_distribution_of_tasks_in_one_line(
    distributions: Path, core_and_hints: Path, tmp_path: Path
) -> None:
    done = run(core_and_hints, tmp_path, "-m", "distcore", "train")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        after_first_line(done.stderr)
        == "error: no task is named, and nothing that is installed has a default one: pip install"
        f" --find-links {distributions} distcore-tasks, or name one by --task NAME or --task"
        " file.py:Class\n"
    )
    done = run(
        core_and_hints,
        tmp_path,
        "-m",
        "distcore",
        "train",
        "--task",
        "text-classification",
        "--data",
        "rows.json",
    )
    assert done.returncode == 2
    assert f"pip install --find-links {distributions} distcore-tasks" in done.stderr
    assert after_first_line(done.stderr).count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "owner"), [("index", "data"), ("migrate", "migrate"), ("plan", "workbench")]
)
def test_a_command_that_is_not_installed_says_how_to_get_it(
    distributions: Path, core_and_hints: Path, tmp_path: Path, name: str, owner: str
) -> None:
    done = run(core_and_hints, tmp_path, "-m", "distcore", name)
    how = f"pip install --find-links {distributions} distcore-{owner}"
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        after_first_line(done.stderr)
        == f"error: command {name!r} is not installed; get it with: {how}\n"
    )
    assert not re.search(
        rf"^ +{name} ", run(core_and_hints, tmp_path, "-m", "distcore", "--help").stdout, re.M
    )


@pytest.mark.parametrize(("name", "owner"), [("ray", "ray"), ("slurm", "clusters")])
def test_a_launcher_that_is_not_installed_says_how_to_get_it(
    distributions: Path, core_and_hints: Path, tmp_path: Path, name: str, owner: str
) -> None:
    done = run(core_and_hints, tmp_path, "-m", "distcore", "train", "--launcher", name)
    how = f"pip install --find-links {distributions} distcore-{owner}"
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        after_first_line(done.stderr)
        == f"error: no launcher named {name!r} (installed: local). Install it with: {how}\n"
    )


def test_the_profile_and_the_exporter_that_are_not_installed_say_how_to_get_them(
    distributions: Path, core_and_hints: Path, tmp_path: Path
) -> None:
    (tmp_path / "line.py").write_text(OWN_TASK)
    job = [
        "-m",
        "distcore",
        "train",
        "--task",
        "line.py:Line",
        "--lr",
        "0.1",
        "--max-steps",
        "1",
        "--out",
        "run",
    ]
    how = f"Install it with: pip install --find-links {distributions} distcore"
    done = run(core_and_hints, tmp_path, *job, "--profile")
    assert done.returncode == 2
    assert re.fullmatch(
        rf"error: no extension named 'profile' \(installed: .*\)\. {re.escape(how)}-workbench\n",
        after_first_line(done.stderr),
    )
    assert run(core_and_hints, tmp_path, *job).returncode == 0
    done = run(core_and_hints, tmp_path, "-c", EXPORT)
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"StrategyError: no exporter named 'huggingface' (installed: none). {how}-tasks\n"
    )
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("source", ["checkout", "wheels"])
def test_the_line_that_an_error_names_installs_the_strategy(
    distributions: Path, tmp_path: Path, source: str
) -> None:
    sources = {
        "checkout": ["./core", "."],
        "wheels": [wheel(distributions, name) for name in ("distcore_core", "distcore")],
    }
    python = make_environment(tmp_path / "environment", sources[source])
    done = run(python, tmp_path, "-m", "distcore", "train", "--strategy", "fsdp")
    assert done.returncode == 2
    line = shlex.split(done.stderr.partition("Install it with: pip ")[2])
    assert line[0] == "install", done.stderr
    # What it requires is there, and so is what builds it.
    subprocess.run(
        [python, "-m", "pip", *line, "--quiet", "--no-deps", "--no-build-isolation"],
        cwd=tmp_path,
        check=True,
    )
    offered = "from distcore import registry; print(*registry.offers('strategies'))"
    assert "fsdp" in run(python, tmp_path, "-c", offered).stdout.split()


def test_the_line_that_installs_tasks_from_a_checkout_brings_what_they_require_of_ours(
    tmp_path: Path,
) -> None:
    python = make_environment(tmp_path / "environment", ["./core", "."])
    done = run(
        python,
        tmp_path,
        "-m",
        "distcore",
        "train",
        "--task",
        "text-classification",
        "--data",
        "rows.json",
    )
    line = shlex.split(done.stderr.partition("Install some with: pip ")[2].partition(";")[0])
    assert line[0] == "install", done.stderr
    subprocess.run(
        [python, "-m", "pip", *line, "--quiet", "--no-deps", "--no-build-isolation"],
        cwd=tmp_path,
        check=True,
    )
    assert (
        run(python, tmp_path, "-c", "import distcore_tasks.text_classification.rows").returncode
        == 0
    )


@pytest.mark.ranks
def test_the_core_and_one_strategy_train_a_task_of_ones_own_without_transformers(
    distributions: Path, tmp_path: Path
) -> None:
    (fsdp,) = (folder for folder in PLUGINS if folder.name == "fsdp")
    python = installed(distributions, tmp_path / "environment", fsdp, *WITHOUT)
    assert run(python, tmp_path, "-c", "import transformers").returncode == 1
    (tmp_path / "own.py").write_text(OWN_TASK)
    job = "train --task own.py:Line --strategy fsdp --nproc 2 --set device=cpu --out run"
    done = run(python, tmp_path, "-m", "distcore", *job.split())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/report.json").is_file()


def test_distcore_and_those_that_it_brings_agree_on_their_versions(
    distributions: Path, tmp_path: Path
) -> None:
    names = ("distcore", "distcore_core", *(f"distcore_{name}" for name in BESIDE))
    python = make_environment(
        tmp_path / "environment", (wheel(distributions, name) for name in names)
    )
    said = run(python, tmp_path, "-m", "pip", "check").stdout.splitlines()
    assert not [line for line in said if line.startswith("distcore")]
    listed = run(python, tmp_path, "-m", "pip", "list", "--format", "freeze").stdout.split()
    assert sorted(line for line in listed if line.startswith("distcore")) == sorted(
        f"{name.replace('_', '-')}=={version(name)}" for name in names
    )
