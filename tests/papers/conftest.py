"""Archives of ``make dist``, built once for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from environments import environment, from_wheels, newest_python, shell, site_packages
from made_once import folder_of_all_workers, made_once
from published_pages import ROOT, lines, program


@pytest.fixture(scope="session")
def environments_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what takes minutes to make: that of ``DISTCORE_TEST_ENVIRONMENTS``, where the
    next call finds it.

    Whoever changes the code afterwards removes it.
    """
    kept = os.environ.get("DISTCORE_TEST_ENVIRONMENTS")
    return Path(kept) if kept else folder_of_all_workers(tmp_path_factory)


@pytest.fixture(scope="session")
def distributions(environments_folder: Path) -> Path:
    """The folder that ``make dist`` fills: an sdist and a wheel of each distribution,
    passed by ``twine check``.
    """
    return made_once(environments_folder / "dist", _make_distributions)


def _make_distributions(folder: Path) -> None:
    # The environment of the tests builds: make need not bring one up to date.
    command = [
        "make",
        "--old-file=install",
        "dist",
        f"DIST={folder}",
        f"BIN={Path(sys.executable).parent}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def torch_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that answers with the packages of an environment of that Python which has
    torch alone, made once.
    """

    @cache
    def packages(python: str) -> Path:
        home = environment(tmp_path_factory.mktemp("torch") / "home", python)
        shell("pip install torch", home)
        return site_packages(home)

    return packages


@pytest.fixture(scope="session")
def readme_environment(
    environments_folder: Path, request: pytest.FixtureRequest
) -> Callable[[str], Path]:
    """A function that answers with an environment that README's install line has made,
    one of each kind.

    ``checkout``: as the line stands there; ``wheels`` and ``wheels-newest``: from wheels, for this
    Python and for the newest one of this machine.
    """

    @cache
    def make(kind: str) -> Path:
        python = newest_python() if kind.endswith("newest") else sys.executable
        if python is None:
            pytest.skip(
                f"no Python behind {sys.version_info.major}.{sys.version_info.minor} is on this"
                " machine"
            )
        (line,) = (line for line in lines(ROOT / "README.md", "sh") if program(line) == "pip")
        if kind.startswith("wheels"):
            line = from_wheels(line, request.getfixturevalue("distributions"))

        def install(home: Path) -> None:
            environment(home, python)
            shell("pip install torch", home)
            shell(line, home)

        return made_once(environments_folder / kind, install)

    return make
