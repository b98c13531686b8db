"""A release as users get it: from an index, by name, in an environment of its own, for each
Python that is here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from html import escape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from environments import environment, later_pythons, shell

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SOURCES = ("deepspeed", "horovod", "ray")
"""Extras that compile for minutes, or fetch more than a test may."""
NEXT = "0.2.0"
Torch = Callable[[str], Path]
JOB = (
    "distcore train --model bert-tiny --max-seq-len 16 --device cpu --out run --save-every 2"
    " --log-level error"
)

pytestmark = [pytest.mark.slow, pytest.mark.programs, pytest.mark.timeout(1800)]


class Quiet(SimpleHTTPRequestHandler):
    """A folder by HTTP; whoever asks for it is not logged."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def archives(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the index serves: these archives, by project, as the simple repository of
    PEP 503 has them.
    """
    folder = tmp_path_factory.mktemp("index")
    add(folder, distributions)
    return folder


def add(index: Path, distributions: Path) -> None:
    """Add archives to the folder of an index."""
    for file in distributions.iterdir():
        project = index / "simple" / file.name.split("-0.")[0].replace("_", "-")
        project.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, project)
        links = (
            f'<a href="{escape(each.name)}">{escape(each.name)}</a>'
            for each in project.glob("*-0.*")
        )
        (project / "index.html").write_text("\n".join(links))


@pytest.fixture(scope="module")
def index(archives: Path) -> Iterator[str]:
    """The address of a package index on loopback that has our distributions alone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(archives))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()
        thread.join()


@pytest.mark.ranks
@pytest.mark.parametrize("minor", [None, 12, 13, 14])  # of the Python, None for this one
def test_a_release_installs_by_name_trains_and_leaves_nothing_behind(
    index: str, torch_of: Torch, tmp_path: Path, minor: int | None
) -> None:
    pythons = later_pythons([minor]) if minor else [sys.executable]
    if not pythons:
        pytest.skip(f"no Python 3.{minor} here")
    (python,) = pythons
    home = environment(tmp_path / "environment", python, torch_of(python))
    shell("pip install distcore[ddp]", home, tmp_path, PIP_EXTRA_INDEX_URL=index)
    shell(f"{JOB} --max-steps 2 --strategy ddp --nproc 2", home, tmp_path, OMP_NUM_THREADS="1")
    installed = shell("pip freeze", home, tmp_path).splitlines()
    ours = [line.partition("==")[0] for line in installed if line.startswith("distcore")]
    assert {"distcore", "distcore-core", "distcore-ddp", "distcore-tasks"} < set(ours)
    shell(f"pip uninstall --yes {' '.join(ours)}", home, tmp_path)
    assert not list(home.rglob("*distcore*"))


@pytest.mark.parametrize("extra", [name for name in EXTRAS if name not in SOURCES])
def test_each_extra_installs_alone(index: str, torch_of: Torch, tmp_path: Path, extra: str) -> None:
    home = environment(tmp_path / "environment", packages=torch_of(sys.executable))
    shell(f"pip install distcore[{extra}]", home, tmp_path, PIP_EXTRA_INDEX_URL=index)
    assert "single" in shell("distcore strategies", home, tmp_path)


def test_a_run_of_this_version_goes_on_under_the_next(
    index: str, archives: Path, torch_of: Torch, tmp_path: Path
) -> None:
    home = environment(tmp_path / "environment", packages=torch_of(sys.executable))
    shell("pip install distcore", home, tmp_path, PIP_EXTRA_INDEX_URL=index)
    shell(f"{JOB} --max-steps 2", home, tmp_path)
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in tracked.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for file in source.rglob("distcore*/__init__.py"):
        file.write_text(
            file.read_text().replace('__version__ = "0.1.0"', f'__version__ = "{NEXT}"')
        )
    made = [
        "make",
        "--old-file=install",
        "dist",
        f"DIST={tmp_path}/next",
        f"BIN={Path(sys.executable).parent}",
    ]
    subprocess.run(made, cwd=source, capture_output=True, check=True)
    add(archives, tmp_path / "next")
    upgrade = f"pip install --upgrade --upgrade-strategy eager distcore=={NEXT}"
    shell(upgrade, home, tmp_path, PIP_EXTRA_INDEX_URL=index, PIP_NO_CACHE_DIR="1")
    assert f"distcore-core=={NEXT}" in shell("pip freeze", home, tmp_path)
    shell(
        "distcore train --out run --resume auto --max-steps 4 --resume-changed max_steps",
        home,
        tmp_path,
    )
    assert "step-00000004" in shell("distcore checkpoint ls run", home, tmp_path)
