"""tools/release_check.py refuses what must not be published, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import distcore

pytestmark = pytest.mark.programs

ROOT = Path(__file__).parents[2]
TOP, CORE = f"distcore-{distcore.__version__}", f"distcore_core-{distcore.__version__}"
PLACEHOLDER, ADDRESS = b"example.invalid", b"distcore.org"
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
"""Of tarfile, from Python 3.11.4 on."""


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/release_check.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def releasable(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sdist and wheel of the top distribution, built from its own sdist with addresses in
    place of the placeholders.
    """
    folder = tmp_path_factory.mktemp("release")
    with tarfile.open(distributions / f"{TOP}.tar.gz") as archive:
        archive.extractall(folder, **FILTER)
    source = folder / TOP
    for file in (source / name for name in ("pyproject.toml", "CHANGELOG.md", "SECURITY.md")):
        file.write_bytes(file.read_bytes().replace(PLACEHOLDER, ADDRESS))
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(source),
    ]
    subprocess.run(command, capture_output=True, check=True)
    return folder / "dist"


@pytest.fixture
def copied(releasable: Path, tmp_path: Path) -> Path:
    """A copy of ``releasable`` for a test to spoil."""
    return Path(shutil.copytree(releasable, tmp_path / "dist"))


def rewrite(folder: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """Put ``change(name, content)`` in place of each file of the wheel in ``folder``;
    ``None`` leaves it out.
    """
    [file] = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            if (new := change(name, content)) is not None:
                archive.writestr(name, new)


def test_today_is_refused_for_its_placeholders_and_for_nothing_else(distributions: Path) -> None:
    done = check(distributions)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert (
        f"{TOP}.tar.gz: pyproject.toml: example.invalid is a placeholder; put the real address in"
        in lines
    )
    assert (
        f"{TOP}.tar.gz: SECURITY.md: example.invalid is a placeholder; put the real address in"
        in lines
    )
    assert {line.partition(": ")[0] for line in lines} == {
        file.name for file in distributions.iterdir()
    }
    assert all("placeholder" in line for line in lines)


def test_a_build_with_addresses_may_be_published(releasable: Path) -> None:
    done = check(releasable)
    assert (done.returncode, done.stdout) == (0, "2 files may be published\n")


def test_a_missing_license_is_refused(copied: Path) -> None:
    rewrite(copied, lambda name, content: None if name.endswith("/LICENSE") else content)
    assert f"{TOP}-py3-none-any.whl: holds no LICENSE" in check(copied).stdout


def test_an_archive_with_another_license_is_refused(copied: Path) -> None:
    rewrite(
        copied,
        lambda name, content: b"All rights reserved." if name.endswith("/LICENSE") else content,
    )
    assert f"{TOP}-py3-none-any.whl: its LICENSE is not the project's" in check(copied).stdout


def test_versions_that_differ_are_refused(copied: Path) -> None:
    stated = f"\nVersion: {distcore.__version__}\n".encode()
    rewrite(copied, lambda _, content: content.replace(stated, b"\nVersion: 9.9\n"))
    problems = check(copied).stdout.splitlines()
    now, file = distcore.__version__, f"{TOP}-py3-none-any.whl"
    assert problems == [
        f"distcore: expected one sdist and one wheel of one version, found sdist {now}, wheel 9.9",
        f"{file}: the metadata says version 9.9, the file name {now}",
    ]


def test_a_version_that_the_package_does_not_state_is_refused(
    distributions: Path, tmp_path: Path
) -> None:
    now, file = distcore.__version__, f"{CORE}-py3-none-any.whl"
    shutil.copy(distributions / file, tmp_path)
    stated = f'\n__version__ = "{now}"\n'.encode()
    rewrite(tmp_path, lambda _, content: content.replace(stated, b'\n__version__ = "9.9"\n'))
    assert (
        f"{file}: the metadata says version {now}, distcore.__version__ 9.9"
        in check(tmp_path).stdout.splitlines()
    )


def test_metadata_without_addresses_is_refused(copied: Path) -> None:
    rewrite(copied, lambda _, content: content.replace(b"\nProject-URL: ", b"\nKeywords: "))
    assert check(copied).stdout == f"{TOP}-py3-none-any.whl: no project URLs\n"


def test_a_changelog_without_the_version_is_refused(copied: Path, tmp_path: Path) -> None:
    with tarfile.open(copied / f"{TOP}.tar.gz") as archive:
        archive.extractall(tmp_path, **FILTER)
    (tmp_path / TOP / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    with tarfile.open(copied / f"{TOP}.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / TOP, TOP)
    expected = (
        f"{TOP}.tar.gz: CHANGELOG.md: no section '## [{distcore.__version__}] - YYYY-MM-DD'\n"
    )
    assert check(copied).stdout == expected


def test_an_sdist_without_its_wheel_is_refused(copied: Path) -> None:
    next(copied.glob("*.whl")).unlink()
    expected = (
        "distcore: expected one sdist and one wheel of one version, found sdist"
        f" {distcore.__version__}\n"
    )
    assert check(copied).stdout == expected


def test_an_empty_folder_is_wrong_input(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path}: holds no sdist and no wheel; make dist builds them" in done.stderr
