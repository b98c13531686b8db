"""The files of ``containers/``: linted, and their commands run here as far as that goes without an
engine of containers or a cluster.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from distcore.cli.main import main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "containers"
INSTRUCTIONS = {"FROM", "ARG", "RUN", "COPY", "ENV", "USER", "WORKDIR", "CMD"}
SKYPILOT = {"name", "num_nodes", "workdir", "resources", "file_mounts", "setup", "run"}
"""Keys of a task of SkyPilot that ours uses."""


def instructions() -> list[tuple[str, str]]:
    """Instruction and words of each line of the Dockerfile, continuations joined."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.M)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    pairs = [line.partition(" ") for line in lines]
    return [(name, " ".join(words.split())) for name, _, words in pairs]


def words_of(instruction: str) -> list[str]:
    return [words for name, words in instructions() if name == instruction]


def check_shell(script: str) -> None:
    """Check the syntax of a shell script."""
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert not done.stderr


def train_words(script: str) -> list[str]:
    """The words behind ``distcore train`` in a script, with files of this machine."""
    text = script.replace("\\\n", " ")
    [command] = re.findall(r"distcore train (.*)", text)
    return shlex.split(command.replace("/shared/", ""))


def test_the_dockerfile_has_known_instructions_and_begins_with_a_pinned_image() -> None:
    names = [name for name, _ in instructions()]
    assert not {*names} - INSTRUCTIONS
    assert names[0] == "FROM"
    image, _, tag = words_of("FROM")[0].partition(":")
    assert image == "python"
    assert re.match(r"3\.\d+", tag)


def test_an_image_keeps_no_caches_and_runs_as_a_user() -> None:
    for line in words_of("RUN"):
        check_shell(line)
        assert "apt-get" not in line or "rm -rf /var/lib/apt/lists" in line
        assert "pip install" not in line or "--no-cache-dir" in line
    assert words_of("USER") == ["1000:1000"]
    # Whoever it is must find a place to write to.
    assert "HOME=/tmp" in words_of("ENV")[0]


def test_what_the_dockerfile_installs_is_in_the_checkout() -> None:
    files = [file for line in words_of("RUN") for file in re.findall(r"--requirement (\S+)", line)]
    assert files == ["requirements.txt"]
    listed = [line for line in (ROOT / files[0]).read_text().splitlines() if line[:1] == "."]
    assert listed
    assert all((ROOT / path / "pyproject.toml").is_file() for path in listed)
    left_out = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert not {"core", "plugins", "hints", "requirements.txt"} & {*left_out}


@pytest.mark.programs
def test_the_lines_that_need_no_network_run_here() -> None:
    """They say that launchers find distcore and torchrun by name."""
    lines = [line for line in words_of("RUN") if not re.search("apt-get|pip install", line)]
    assert lines == ["distcore strategies && torchrun --help > /dev/null"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    subprocess.run(["bash", "-euc", lines[0]], env=environment, capture_output=True, check=True)


def test_the_task_of_skypilot_starts_torchrun_on_each_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert {*task} == SKYPILOT
    for script in ("setup", "run"):
        check_shell(task[script])
    assert {*re.findall(r"\$(SKYPILOT_\w+)", task["run"])} == {
        "SKYPILOT_NODE_IPS",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NUM_GPUS_PER_NODE",
    }
    would_train(train_words(task["run"]), tmp_path, monkeypatch, capsys)


def test_the_job_of_slurm_asks_for_a_task_per_gpu_and_time_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (FOLDER / "slurm.sbatch").read_text()
    check_shell(script)
    asked = dict(
        line.split()[1:] for line in script.splitlines() if re.match(r"#SBATCH --\S+ ", line)
    )
    assert asked["--ntasks-per-node"] == asked["--gpus-per-node"]
    assert asked["--signal"].startswith("TERM@")
    would_train(train_words(script), tmp_path, monkeypatch, capsys)


def would_train(
    words: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Make a dry run of a command, with a small data file and model."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DISTCORE_CACHE", str(folder / "cache"))
    rows = [f'{{"text": "row {number}", "label": {number % 2}}}' for number in range(20)]
    Path("reviews.jsonl").write_text("\n".join(rows) + "\n")
    small = ["--model", "bert-tiny", "--device", "cpu", "--nproc", "2", "--dry-run"]
    assert main(["train", *words, *small]) == 0, capsys.readouterr().err
