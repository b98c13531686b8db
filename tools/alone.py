"""Run the tests of each distribution with the core and that distribution
alone: ``python tools/alone.py [NAME…]``.

Each gets an environment below build/alone: what the present one has of others' packages, and of
ours the core, the distribution, and what its ``pyproject.toml`` requires of ours. ``core`` is the
core with nothing beside it. Arguments behind ``--`` go to pytest.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/alone"
CORE = ROOT / "core"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")


def required(folder: Path) -> list[Path]:
    """Return the folders of the core, of ``folder`` and of what that requires of ours, always
    or for an extra.
    """
    if folder == CORE:
        return [CORE]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    names = {
        re.split(r"[^\w.-]", line)[0]
        for lines in (project["dependencies"], *extras)
        for line in lines
    }
    return [
        CORE,
        folder,
        *(other for other in PLUGINS if f"distcore-{other.name}" in names and other != folder),
    ]


def tests(folder: Path) -> list[Path]:
    """Return the folders of tests of a distribution; those of the core have the
    names of its rooms.
    """
    if folder != CORE:
        return [folder]
    rooms = {room.name for room in (CORE / "distcore").iterdir() if room.is_dir()}
    return sorted(room for room in (ROOT / "tests").iterdir() if room.name in rooms)


def make_environment(home: Path, install: Iterable[str], without: Collection[str] = ()) -> Path:
    """Make an environment in ``home`` and return its interpreter.

    It has the packages that this process can import but those of this repository and those named by
    ``without``, and what ``install`` names for pip.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    # Links, one by one: a folder that is on the path as a whole has the metadata of our
    # distributions in it.
    for place in (Path(place) for place in sys.path if place.endswith("site-packages")):
        for path in place.iterdir():
            is_ours = re.match(r"(_+editable_.*)?distcore([_-]|$)", path.name)
            is_left_out = (
                is_ours or path.suffix == ".pth" or re.split(r"-\d", path.name)[0] in without
            )
            if not is_left_out and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    subprocess.run([python, *PIP, *install], cwd=ROOT, check=True)
    return python


def environment(folder: Path) -> Path:
    """Return the interpreter of the environment of a distribution of this checkout;
    made if need be.
    """
    home = BUILD / folder.name
    made, newest = (
        home / "pyvenv.cfg",
        max((part / "pyproject.toml").stat().st_mtime for part in required(folder)),
    )
    # what pip has written of entry points would be of before
    if not made.exists() or made.stat().st_mtime < newest:
        shutil.rmtree(home, ignore_errors=True)
        names = (f"./{part.relative_to(ROOT)}" for part in required(folder))
        make_environment(home, (word for name in names for word in ("--editable", name)))
    return home / "bin/python"


def main() -> int:
    """Return the number of distributions whose tests failed."""
    given = sys.argv[1:]
    names = given[: given.index("--")] if "--" in given else given
    more = given[len(names) + 1 :]
    failed = []
    for folder in (CORE, *PLUGINS):
        if names and folder.name not in names:
            continue
        places = [str(place.relative_to(ROOT)) for place in tests(folder)]
        done = subprocess.run(
            [environment(folder), "-m", "pytest", "-q", *more, *places], cwd=ROOT, check=False
        )
        is_passed = done.returncode in (0, 5)  # 5: none of its tests has the marks asked for
        print(f"{folder.name}: {'passed' if is_passed else 'FAILED'}", flush=True)
        failed += [folder.name] * (not is_passed)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
