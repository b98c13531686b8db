"""Run the tests of each distribution with the core and that distribution alone: ``python tools/alone.py [NAME…]``.

Each gets an environment below build/alone, in which no other distribution of this repository can be imported; what
they need of others' packages is taken from the environment that runs this. What a name's ``pyproject.toml`` requires of
ours is installed with it. Arguments behind ``--`` go to pytest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/alone"
DISTRIBUTIONS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))


def required(folder: Path) -> list[Path]:
    """Return ``folder`` and the folders of what it requires of ours beside the core, always or for an extra."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    names = {re.split(r"[^\w.-]", line)[0] for lines in (project["dependencies"], *extras) for line in lines}
    return [folder, *(other for other in DISTRIBUTIONS if f"distcore-{other.name}" in names and other != folder)]


def environment(folder: Path) -> Path:
    """Return the interpreter of an environment with the core and what ``folder`` requires of ours; made if need be."""
    home = BUILD / folder.name
    python = home / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        site = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
        # Lines with folders: unlike a site folder, no .pth file in them is read, and so none of our editable installs.
        packages = [place for place in sys.path if place.endswith("site-packages")]
        Path(site, "others.pth").write_text("".join(f"{place}\n" for place in packages))
        folders = ["core", *(str(other.relative_to(ROOT)) for other in required(folder))]
        install = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--force-reinstall",
        ]
        subprocess.run(
            [*install, *(word for name in folders for word in ("--editable", f"./{name}"))], cwd=ROOT, check=True
        )
    return python


def main() -> int:
    """Return the number of distributions whose tests failed."""
    names, _, more = " ".join(sys.argv[1:]).partition("--")
    asked = [folder for folder in DISTRIBUTIONS if not names.split() or folder.name in names.split()]
    failed = []
    for folder in asked:
        allowed = ",".join(f"distcore-{other.name}" for other in required(folder))
        command = [str(environment(folder)), "-m", "pytest", "-q", str(folder.relative_to(ROOT)), *more.split()]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "DISTCORE_LOAD_PLUGINS": allowed}, check=False)
        print(f"{folder.name}: {'passed' if done.returncode == 0 else 'FAILED'}", flush=True)
        failed += [folder.name] * (done.returncode != 0)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
