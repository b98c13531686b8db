"""The contents of the sdists and wheels of all distributions."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LICENSE = (ROOT / "LICENSE").read_bytes()
PLUGINS = sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml"))
PACKAGES = ["distcore_core", *(f"distcore_{plugin.name}" for plugin in PLUGINS)]
DISTRIBUTIONS = ["distcore", *PACKAGES]

pytestmark = pytest.mark.programs


def sdist(folder: Path, package: str) -> dict[str, bytes]:
    """Content of an sdist's files, by their path below its top folder."""
    top = f"{package}-{version(package)}"
    with tarfile.open(folder / f"{top}.tar.gz") as archive:
        opened = {entry.name: archive.extractfile(entry) for entry in archive if entry.isfile()}
        return {
            name.removeprefix(f"{top}/"): file.read()
            for name, file in opened.items()
            if file is not None
        }


def wheel(folder: Path, package: str) -> dict[str, bytes]:
    """Content of a wheel's files, by their path."""
    with zipfile.ZipFile(folder / f"{package}-{version(package)}-py3-none-any.whl") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def plugin_of(package: str) -> Path:
    """The folder of a plugin, by the name of its package."""
    return ROOT / "plugins" / package.removeprefix("distcore_")


def test_make_dist_builds_an_sdist_and_a_wheel_of_every_distribution(distributions: Path) -> None:
    expected = {
        f"{package}-{version(package)}{end}"
        for package in DISTRIBUTIONS
        for end in (".tar.gz", "-py3-none-any.whl")
    }
    assert {file.name for file in distributions.iterdir()} == expected


@pytest.mark.parametrize("package", ["distcore_core", "distcore_workbench"])
def test_a_second_build_has_the_same_bytes(
    distributions: Path, tmp_path: Path, package: str
) -> None:
    source = ROOT / "core" if package == "distcore_core" else plugin_of(package)
    command = [
        sys.executable,
        "-m",
        "build",
        "--quiet",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    again = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(again) == 2
    assert all((distributions / name).read_bytes() == content for name, content in again.items())


@pytest.mark.parametrize("package", DISTRIBUTIONS)
def test_the_license_reaches_sdist_and_wheel(distributions: Path, package: str) -> None:
    assert sdist(distributions, package)["LICENSE"] == LICENSE
    assert (
        wheel(distributions, package)[f"{package}-{version(package)}.dist-info/licenses/LICENSE"]
        == LICENSE
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_is_typed_and_holds_every_file_of_the_package(
    distributions: Path, package: str
) -> None:
    core = package == "distcore_core"
    source, imported = (ROOT / "core", "distcore") if core else (plugin_of(package), package)
    files = {
        str(file.relative_to(source)) for file in (source / imported).rglob("*") if file.is_file()
    }
    expected = {name for name in files if "__pycache__" not in name}
    assert f"{imported}/py.typed" in expected
    assert {name for name in wheel(distributions, package) if ".dist-info/" not in name} == expected


def test_the_top_has_hints_and_papers_and_the_file_of_its_version(distributions: Path) -> None:
    papers = {
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "SECURITY.md",
        "pyproject.toml",
        "PKG-INFO",
        ".gitignore",
    }
    hints = {f"distcore_hints/{name}" for name in ("__init__.py", "hints.toml", "py.typed")}
    sources = {"core/distcore/__init__.py", *(f"hints/{name}" for name in hints)}
    assert {*sdist(distributions, "distcore")} == papers | sources
    content = {name for name in wheel(distributions, "distcore") if ".dist-info/" not in name}
    assert content == hints


def test_the_core_sdist_holds_sources_and_papers_and_nothing_else(distributions: Path) -> None:
    papers = {"README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert {
        name for name in sdist(distributions, "distcore_core") if not name.startswith("distcore/")
    } == papers


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_sdist_holds_sources_tests_and_papers_and_nothing_else(
    distributions: Path, plugin: Path
) -> None:
    package = f"distcore_{plugin.name}"
    names = sdist(distributions, package)
    papers = {"README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert {name for name in names if not name.startswith((f"{package}/", "tests/"))} == papers
    assert any(name.startswith("tests/") for name in names)
