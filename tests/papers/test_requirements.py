"""The requirements files of a checkout install what the wheels and their extras bring."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from environments import ROOT, folders_of
from packaging.requirements import Requirement

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
STRATEGIES_OF_THE_FIRST_PAGES = ("ddp", "fsdp")


def folder_of(requirement: str) -> str:
    """Return the folder of a distribution of this project, with its extras, as pip takes it."""
    parsed = Requirement(requirement)
    name = parsed.name.removeprefix("distcore-")
    folder = "./core" if name == "core" else f"./plugins/{name}"
    extras = ",".join(sorted(parsed.extras))
    return f"{folder}[{extras}]" if extras else folder


def test_the_first_file_brings_what_the_wheel_brings_and_the_strategies_of_the_first_pages() -> (
    None
):
    folders = folders_of("pip install -r requirements.txt")
    brought = [folder_of(requirement) for requirement in PROJECT["dependencies"]]
    brought += [folder_of(f"distcore-{name}") for name in STRATEGIES_OF_THE_FIRST_PAGES]
    assert sorted(folders) == sorted([".", *brought])


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_has_a_file_that_brings_the_same(extra: str) -> None:
    first = folders_of("pip install -r requirements.txt")
    folders = folders_of(f"pip install -r requirements/{extra}.txt")
    assert folders == first + [folder_of(requirement) for requirement in EXTRAS[extra]]


def test_there_is_no_file_of_another_name() -> None:
    assert {file.stem for file in (ROOT / "requirements").iterdir()} == set(EXTRAS)
