"""Hints for error lines: flags of other libraries, and the distribution that has a plugin.

The core loads this module by its entry point in ``distcore.hints``, once an error needs a hint.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_HINTS: dict[str, Any] = tomllib.loads(files(__name__).joinpath("hints.toml").read_text("utf-8"))

FLAGS: Mapping[str, str] = _HINTS["flags"]
"""Flags of other libraries, each with the flag to use here, and perhaps a remark."""
KEYS: Mapping[str, str] = _HINTS["keys"]
"""The config key for a flag of ``FLAGS``, where its name is not that of the flag to use here."""
SHIPPED: Mapping[str, Mapping[str, Sequence[str]]] = _HINTS["shipped"]
"""By distribution and group of entry points: names of plugins."""


def how_to_install(distribution: str) -> str:
    """Return the command that installs a distribution of this project from where this one
    came: a checkout, or a folder of wheels.
    """
    source = _source()
    plugin = source / "plugins" / distribution.removeprefix("distcore-")
    if not plugin.is_dir():
        return f"pip install --find-links {shlex.quote(str(source))} {distribution}"
    folders = [plugin, *_missing_requirements(plugin)]
    return "pip install " + " ".join(shlex.quote(str(folder)) for folder in folders)


def _source() -> Path:
    """Return the folder that this distribution was installed from; ``dist``, which ``make dist``
    fills, if pip did not record it.
    """
    record = Distribution.from_name("distcore").read_text("direct_url.json")
    url = json.loads(record)["url"] if record else ""
    if not url.startswith("file:"):
        return Path("dist")
    source = Path(unquote(urlsplit(url).path))
    return source.parent if source.suffix == ".whl" else source


def _missing_requirements(plugin: Path) -> list[Path]:
    """Return the folders of a checkout that ``plugin`` requires and that are not installed.

    Without them on its command line, pip would look for them on a package index.
    """
    project = tomllib.loads((plugin / "pyproject.toml").read_text("utf-8"))["project"]
    required = re.findall(r"\bdistcore-(?!core\b)(\w+)", " ".join(project["dependencies"]))
    return [
        plugin.with_name(name)
        for name in required
        if importlib.util.find_spec(f"distcore_{name}") is None
    ]
