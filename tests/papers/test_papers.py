"""The papers around the code: licence, versions, changelog, what a contributor reads."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import distcore

ROOT = Path(__file__).parents[2]
PROJECTS = [
    ROOT,
    ROOT / "core",
    *sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml")),
]
TYPED = [
    file
    for place in ("core", "hints", "plugins/*", "examples/*")
    for file in sorted(ROOT.glob(f"{place}/*/__init__.py"))
]
PAPERS = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_every_distribution_has_the_project_license_as_a_plain_file(project: Path) -> None:
    """A copy, not a link: an sdist is built from the folder alone."""
    file = project / "LICENSE"
    assert not file.is_symlink()
    assert file.read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_the_version_stands_in_the_package_alone_and_is_the_one_installed(project: Path) -> None:
    tree = tomllib.loads((project / "pyproject.toml").read_text())
    assert "version" not in tree["project"]
    source = (project / tree["tool"]["hatch"]["version"]["path"]).read_text()
    installed = version(tree["project"]["name"])
    assert re.findall(r'^__version__ = "(.+)"$', source, re.M) == [installed], (
        "changed after make install?"
    )


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_distributions_describe_themselves_alike(project: Path) -> None:
    core, tree = (
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for folder in (ROOT, project)
    )
    for key in ("license", "license-files", "classifiers", "requires-python", "urls"):
        assert tree[key] == core[key], key


@pytest.mark.parametrize("file", TYPED, ids=lambda file: file.parent.name)
def test_every_package_is_typed(file: Path) -> None:
    assert file.with_name("py.typed").is_file()


def test_the_extras_that_the_docs_name_are_those_of_the_metadata() -> None:
    extras = set(metadata("distcore").get_all("Provides-Extra") or ())
    pages = [
        ROOT / "README.md",
        *sorted(ROOT.glob("docs/*.md")),
        *sorted(ROOT.glob("plugins/*/README.md")),
    ]
    named = {
        extra
        for page in pages
        for listed in re.findall(r"distcore\[([\w,-]+)\]", page.read_text())
        for extra in listed.split(",")
    }
    assert named <= extras
    listed = re.search(r"The extras are\s+([^.]+)\.", (ROOT / "docs/quickstart.md").read_text())
    assert listed, "docs/quickstart.md lists them"
    assert set(re.findall(r"`([\w-]+)`", listed[1])) == extras


def test_every_extra_asks_for_what_this_repository_has() -> None:
    """A distribution, or an extra of one, that is built here and of a version that is accepted."""
    for line in requires("distcore") or ():
        needed = Requirement(line)
        assert version(needed.name) in needed.specifier, line
        assert needed.extras <= set(metadata(needed.name).get_all("Provides-Extra") or ()), line


def test_the_changelog_has_sections_for_this_version_and_the_next() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == "Unreleased"
    assert distcore.__version__ in headings


@pytest.mark.parametrize("paper", PAPERS)
def test_links_of_the_papers_lead_somewhere(paper: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / paper).read_text()):
        assert (ROOT / target).exists(), target


def test_every_make_target_that_contributors_are_told_of_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([\w-]+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert named
    assert not {target for target in named if not re.search(rf"^{target}:", makefile, re.M)}
