"""The environment variables of the ranks: from ``--env``, from ``.distcore.env``, and some of the caller's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from distcore.errors import ConfigError

ENV_FILE = ".distcore.env"
"""In the current folder or else the home folder: lines of NAME=VALUE."""
FORWARDED = re.compile(
    r"(DISTCORE|GLOO|MKL|NCCL|OMP|TORCH|TRANSFORMERS|UCX)_\w+|HF_(?!TOKEN)\w+|PYTHON\w+|LD_LIBRARY_PATH"
)
"""Names of the caller's variables that go to other machines; the rest stays: it speaks of this machine or is secret."""


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environ`` that ranks on other machines get, too."""
    return {name: environ[name] for name in sorted(environ) if FORWARDED.fullmatch(name)}


def settings(given: Iterable[str], folders: Iterable[Path]) -> dict[str, str]:
    """Return the variables of the first ``.distcore.env`` in ``folders``, overridden by those of ``--env``.

    Raises ConfigError for a line other than NAME=VALUE.
    """
    variables: dict[str, str] = {}
    if file := next((path for folder in folders if (path := folder / ENV_FILE).is_file()), None):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                variables |= _pair(line.strip().removeprefix("export "), f"{file}, line {number}")
    for text in given:
        variables |= _pair(text, "--env")
    return variables


def _pair(text: str, where: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ConfigError(f"{where}: {text!r}: expected NAME=VALUE")
    return {name: value}
