"""Each install line of the pages, as it stands there, in an environment that has Python,
pip and torch alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import environment, folders_of, newest_python, shell
from published_pages import ROOT, run_commands, workshop

PAGES = [ROOT / name for name in ("README.md", "docs/quickstart.md", "core/README.md")]
PAGES += sorted(ROOT.glob("plugins/*/README.md"))
NAMED = sorted(
    int(minor)
    for minor in re.findall(
        r"Python :: 3\.(\d+)\"", (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
)
"""Minor versions of Python that the metadata names."""
NEWEST = f"3.{NAMED[-1]}"
ALWAYS = ("README.md",)
"""Pages whose lines every run of the tests tries; those of the others take minutes more."""
LARGE = ("ray",)
"""Extras that bring what is too large to be fetched for a test."""
SOURCES = ("deepspeed", "horovod")
"""Extras that bring a package which has no wheel."""
BROUGHT_BY_NONE = ("accelerate", "datasets", "peft", "PIL")
"""Packages that the environment of the tests has, and that README's line does not bring."""
SMALL = "--max-seq-len 16 --global-batch-size 8 --max-steps 2 --device cpu"

pytestmark = [pytest.mark.programs, pytest.mark.timeout(1800)]


def lines() -> dict[str, Path]:
    """The lines, each with the first page that has it."""
    pages: dict[str, Path] = {}
    for page in PAGES:
        joined = re.sub(r"\\\n\s*", "", page.read_text())
        for line in re.findall(r"^pip install .*$", joined, re.M):
            if not any(f"/{name}" in line for name in LARGE):
                pages.setdefault(" ".join(line.partition("  #")[0].split()), page)
    return pages


@pytest.mark.parametrize(
    "find",
    [
        pytest.param(lambda: sys.executable, id="this"),
        pytest.param(newest_python, id="newest", marks=pytest.mark.slow),
    ],
)  # the newest Python may get a torch for CUDA, of 6 GB
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=() if str(page.relative_to(ROOT)) in ALWAYS else pytest.mark.slow)
        for line, page in lines().items()
    ],
)
def test_an_install_line_needs_nothing_beside_it(
    distributions: Path,
    torch_of: Callable[[str], Path],
    readme_environment: Callable[[str], Path],
    tmp_path: Path,
    line: str,
    find: Callable[[], str | None],
) -> None:
    python = find()
    if python is None:
        pytest.skip(
            f"of the Pythons up to {NEWEST} only {sys.version_info.major}.{sys.version_info.minor}"
            " is here"
        )
    if python == sys.executable and str(lines()[line].relative_to(ROOT)) in ALWAYS:
        home = readme_environment("checkout")
    else:
        home = environment(tmp_path / "environment", python, torch_of(python))
        shell(line.replace("--find-links dist", f"--find-links {distributions}"), home)
    shell("distcore --help", home, tmp_path)
    strategies = shell("distcore strategies", home, tmp_path)
    named = " ".join(folders_of(line))
    for name in re.findall(r"plugins/(ddp|fsdp|mesh|deepspeed|accelerate)\b", named):
        assert name in strategies


@pytest.mark.ranks
def test_a_folder_of_ours_trains_on_two_ranks_with_what_the_install_line_brings(
    readme_environment: Callable[[str], Path], tmp_path: Path
) -> None:
    home, folder = readme_environment("checkout"), workshop(tmp_path / "page", ROOT / "README.md")
    absent = f"import importlib.util as u; assert not any(map(u.find_spec, {BROUGHT_BY_NONE}))"
    train = f"distcore train --data reviews.jsonl {SMALL}"
    commands = (
        f'python -c "{absent}"',
        f"{train} --model bert-tiny --out first",
        "distcore checkpoint export first --to folder",
        f"{train} --model folder --strategy ddp --nproc 2 --out replicated",
        f"{train} --model folder --strategy fsdp --nproc 2 --out sharded",
        "distcore plan --data reviews.jsonl --model folder --strategies ddp,fsdp --nproc 2",
        "distcore eval sharded --strategy ddp --nproc 2",
    )
    assert not run_commands(ROOT / "README.md", folder, commands, home / "bin")
    kept = [
        json.loads((folder / out / "report.json").read_text()) for out in ("replicated", "sharded")
    ]
    assert kept[0]["evaluation"]["loss"] == pytest.approx(kept[1]["evaluation"]["loss"], rel=1e-5)


@pytest.mark.slow
def test_the_packages_of_the_extras_have_a_wheel_for_the_newest_python(
    distributions: Path, tmp_path: Path
) -> None:
    """Where that Python is not on this machine; pip reads the metadata alone."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    wanted = ",".join(name for name in extras if name not in SOURCES)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--target",
        str(tmp_path),
    ]
    command += [
        "--python-version",
        NEWEST,
        "--only-binary",
        ":all:",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    command += ["--find-links", str(distributions), f"distcore[{wanted}]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_set_up_finds_its_versions_without_trying_old_ones(tmp_path: Path) -> None:
    """Else it takes minutes, prints a page of warnings, and may end with a release of years ago."""
    home = environment(tmp_path / "environment")
    shell("pip install --upgrade pip", home)
    resolve = "pip install --dry-run --ignore-installed --constraint constraints.txt --group dev"
    printed = shell(resolve, home, PIP_QUIET="0")
    assert "looking at multiple versions" not in printed
    assert "Would install" in printed
