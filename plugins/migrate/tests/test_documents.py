"""Files and command lines of the documents that the project was made from, where they
lie beside the repository.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from distcore.errors import ConfigError
from distcore_migrate import migrate

SEEDS = Path(__file__).parents[4] / "shared/seeds"
LINES = (SEEDS / "commands.txt").read_text().splitlines() if SEEDS.is_dir() else []
pytestmark = pytest.mark.skipif(
    not SEEDS.is_dir(), reason=f"no {SEEDS}: the documents are beside the repository"
)


@pytest.fixture(autouse=True)
def in_their_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SEEDS)


@pytest.mark.parametrize("line", LINES)
def test_each_line_becomes_a_config(line: str) -> None:
    words = shlex.split(line)
    if "zero_to_fp32.py" in line:
        with pytest.raises(ConfigError, match="distcore checkpoint export"):
            migrate([], words)
        return
    made = migrate([], words)
    flags = [
        word.lstrip("-").partition("=")[0].replace("-", "_").removeprefix("no_") for word in words
    ]
    flags = [flag for word, flag in zip(words, flags, strict=True) if word.startswith("--")]
    assert not [flag for flag in flags if flag not in made.text]


@pytest.mark.parametrize(
    "name", sorted(path.name for path in SEEDS.glob("[SY]*.*")) if SEEDS.is_dir() else []
)
def test_each_file_becomes_a_config(name: str) -> None:
    if name == "Y2x.yaml":  # it names a file that is not there
        with pytest.raises(
            ConfigError, match=r"file /path/to/.*json: cannot be read: No such file"
        ):
            migrate([name], [])
        return
    made = migrate([name], [])
    assert made.config.strategy == "deepspeed"
