"""The workflows of GitHub Actions: they call what this repository has, on the Pythons and
torches that are declared.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(name: str) -> dict[Any, Any]:
    workflow: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())
    return workflow


def commands(workflow: dict[Any, Any]) -> list[str]:
    return [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_calls_what_is_there_may_only_read_and_ends_in_time(file: Path) -> None:
    workflow = read(file.name)
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    for command in commands(workflow):
        words = command.split()
        assert words[0] in {"make", "sed"} or (ROOT / words[0]).is_file(), command
        assert words[0] != "make" or set(words[1:]) <= targets, command
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())


def test_every_declared_python_and_the_oldest_declared_torch_are_tried() -> None:
    project = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
    declared = {
        match[1] for one in project["classifiers"] if (match := re.search(r":: (3\.\d+)$", one))
    }
    matrix = read("ci.yml")["jobs"]["quick"]["strategy"]["matrix"]["include"]
    assert {one["python"] for one in matrix} == declared
    (torch,) = (one for one in project["dependencies"] if re.match(r"torch\b", one))
    assert torch.removeprefix("torch") in {one["torch"].partition(",")[0] for one in matrix}
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.M), (
        "what the workflow replaces"
    )


def test_a_release_was_checked_by_a_tag_and_is_attested() -> None:
    release = read("release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}, "YAML reads the key 'on' as a truth value"
    assert commands(release) == ["make release-check"]
    publish = release["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert publish["steps"][-1]["with"] == {"attestations": True}
