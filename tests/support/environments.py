"""Environments of Python that have what a test installs into them, as a user's do."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(folder: Path, python: str = sys.executable, packages: Path | None = None) -> Path:
    """Make an empty environment; where ``packages`` is given, the packages of that
    folder stand beside it.
    """
    subprocess.run([python, "-m", "venv", folder], check=True)
    if packages:
        (site_packages(folder) / "torch.pth").write_text(f"{packages}\n")
    return folder


def site_packages(environment: Path) -> Path:
    """Return the folder of its packages."""
    return next(environment.glob("lib/python3*/site-packages"))


def shell(command: str, environment: Path, folder: Path = ROOT, **variables: str) -> str:
    """Run the command as if the environment were active; return what it prints."""
    # The versions that the tests ran with, among them torch for a CPU: as the pages
    # say, it goes first.
    of_pip = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_QUIET": "1"}
    # Python compiles what a command imports, a small part of the files that pip would compile.
    of_pip["PIP_COMPILE"] = "0"
    given = os.environ | of_pip | variables
    given["PATH"] = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def later_pythons(minors: list[int]) -> list[str]:
    """Return the Pythons 3.N of these minor versions that start here, on PATH
    or of pyenv, one each.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    pythons = []
    for minor in minors:
        name = f"python3.{minor}"
        for python in filter(
            None, [shutil.which(name), *map(str, sorted(pyenv.glob(f"3.{minor}*/bin/{name}")))]
        ):
            started = subprocess.run(
                [python, "-c", "import venv, ensurepip"], capture_output=True, check=False
            )
            if started.returncode == 0:
                pythons.append(python)
                break
    return pythons


def newest_python() -> str | None:
    """Return the newest Python that the metadata names and that starts here; ``None`` if
    that is this one.
    """
    named = re.findall(
        r"Python :: 3\.(\d+)\"", (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    later = sorted(
        (int(minor) for minor in named if int(minor) > sys.version_info.minor), reverse=True
    )
    return next(iter(later_pythons(later)), None)


def folders_of(line: str) -> list[str]:
    """Return the folders of the checkout that an install line names, itself or by `-r FILE`."""
    folders = []
    for word in shlex.split(line)[2:]:
        if word.endswith(".txt"):
            folders += _folders_in(ROOT / word)
        elif word != "-r":
            folders.append(word)
    return folders


def _folders_in(file: Path) -> list[str]:
    """Return the folders that a requirements file and the files which it includes name."""
    folders = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            folders += _folders_in(file.parent / line.removeprefix("-r "))
        elif not line.startswith("#"):
            folders.append(line)
    return folders


def from_wheels(line: str, distributions: Path) -> str:
    """Return an install line that takes wheels of that folder where this one takes
    folders of the checkout.
    """
    folders = (word for word in folders_of(line) if word not in (".", "./core"))
    named = (re.sub(r"^\./plugins/", "distcore-", folder) for folder in folders)
    return f"pip install --find-links {distributions} distcore {' '.join(named)}"
