"""Find plugins by their metadata alone, and import only those that a run uses.

Plugins are entry points in the groups ``distcore.strategies``, ``.tasks``, ``.extensions``,
``.optimizers``, ``.launchers``, ``.rank_environments``, ``.exports``, ``.readers``, ``.commands``
and ``.suites``; a user types the name of an entry point. Those of ``.checkpoints`` are asked in
turn; ``.adapters`` has ``lora``, ``.hosts`` ``hostfile``. ``distcore.default_task`` has one entry
point, the task of a config without a task; ``distcore.default_extensions`` has those of
``distcore.extensions`` that are on unless a config says false. ``DISTCORE_LOAD_PLUGINS=a,b`` allows
only those names or distributions in addition to the core's (empty: no others). ``-p no:NAME``
blocks a name or a distribution. Both take effect before any import. What would install a plugin
that is missing is not known here: the providers of ``distcore.hints`` tell it (hints.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Collection
from functools import cache, lru_cache
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path
from types import ModuleType
from typing import Any

from distcore import hints
from distcore.errors import StrategyError, raised_at, refuse_endings

KINDS = {
    "strategies": "strategy",
    "tasks": "task",
    "launchers": "launcher",
    "extensions": "extension",
    "optimizers": "optimizer",
    "rank_environments": "rank environment",
    "commands": "command",
    "exports": "exporter",
    "default_task": "default task",
    "default_extensions": "default extension",
    "hosts": "reader of hosts",
    "readers": "reader of rows",
    "checkpoints": "reader of checkpoints",
    "adapters": "adapter",
    "suites": "suite of laws",
    "kits": "suite of laws",  # the old name of the group
}
__all__ = ["is_installed", "load", "offers"]
"""The names that any distribution may import."""
CORE = "distcore-core"
"""The distribution of this package. DISTCORE_LOAD_PLUGINS never excludes its plugins."""
BLOCK_VARIABLE = "DISTCORE_BLOCK_PLUGINS"
"""Environment variable with the names that ``-p no:NAME`` blocked, comma
separated: ranks inherit it.
"""


def distribution(entry: EntryPoint) -> str:
    """Return name and version of the distribution that provides ``entry``."""
    return " ".join(_identity(entry.dist)) if entry.dist else "an unknown distribution"


def entries(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted. Imports none of them.

    ``group`` is the part after ``distcore.``. Raises StrategyError if two distributions
    provide the same name.
    """
    return {name: only(group, offered) for name, offered in offers(group).items()}


def offers(group: str) -> dict[str, list[EntryPoint]]:
    """Return, by name and sorted, all entry points of that name, one per
    distribution, without blocked ones.
    """
    offered: dict[str, list[EntryPoint]] = {}
    for entry in sorted(all_offers(group), key=lambda entry: (entry.name, distribution(entry))):
        if not _blocked(entry):
            offered.setdefault(entry.name, []).append(entry)
    return offered


def only(group: str, offered: list[EntryPoint]) -> EntryPoint:
    """Return the only entry point in ``offered``; raises StrategyError if several
    distributions provide the name.
    """
    first, *others = offered
    if others:
        raise StrategyError(
            f"{KINDS[group]} {first.name!r} is provided twice: by {distribution(first)} and by "
            f"{distribution(others[0])}; uninstall one, or block it with -p no:{_owner(others[0])}"
        )
    return first


def default_task() -> str:
    """Return the name of the task of a config that names none; raises StrategyError unless
    just one is offered.
    """
    offered = sorted(
        (entry for offered in offers("default_task").values() for entry in offered),
        key=distribution,
    )
    how = "name one by --task NAME or --task file.py:Class"
    if not offered:
        command = hints.how_to_get("tasks")
        how = f"{command}, or {how}" if command else how
        missing = "no task is named, and nothing that is installed has a default one"
        raise StrategyError(f"{missing}: {how}")
    first, *others = offered
    if others:
        both = " and ".join(f"{distribution(entry)} ({entry.name})" for entry in (first, others[0]))
        raise StrategyError(
            f"no task is named, and two distributions have a default one: {both}; {how}"
        )
    return first.name


def load(group: str, name: str) -> Any:
    """Import and return the object of entry point ``name``, or ``Class``
    if name is ``path/to/file.py:Class``.

    Raises StrategyError, one line, if it is not installed (with the pip command), is
    blocked or does not import.
    """
    if ".py:" in name:
        return load_file(KINDS[group], name)
    installed = offers(group)
    if name not in installed:
        raise StrategyError(_missing(group, name, installed))
    entry = only(group, installed[name])  # only the name in use must be unique
    try:
        return entry.load()
    except Exception as error:  # a broken plugin may raise anything at import
        raise _broken(
            f"{KINDS[group]} {name!r} is installed ({distribution(entry)}) but", error
        ) from error


def load_file(kind: str, reference: str) -> Any:
    """Return ``Class`` of ``path/to/file.py:Class``, a plugin that is not packaged.

    The file can import modules next to it. ``kind`` is for messages. Raises StrategyError, one
    line, if the file or class is missing, or does not import.
    """
    path, _, name = reference.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise StrategyError(f"{kind} {reference!r}: no file {path}")
    try:
        module = _module_of(file.resolve(), file.stat().st_mtime_ns)
    except Exception as error:
        raise error if GUARD in str(error) else _broken(f"{kind} {reference!r}", error) from error
    if (named := getattr(module, name, None)) is None or not (
        kind == "optimizer" or isinstance(named, type)
    ):
        known = [other for other, value in vars(module).items() if isinstance(value, type)]
        what = (
            f"{name} in {path} is not a class"
            if hasattr(module, name)
            else f"no class {name} in {path}"
        )
        raise StrategyError(f"{kind} {reference!r}: {what}{hints.nearest(name, known)}")
    return named


def refuse_while_importing() -> None:
    """Raise StrategyError in a file that a user named for its class: each process that imports it
    would start a run.
    """
    if _importing:
        raise StrategyError(
            f"{_importing[0].name}: starts a run as it is imported; put that below {GUARD}"
        )


def _broken(what: str, error: Exception) -> StrategyError:
    """Return the error of a plugin that does not import, with its place unless it says
    itself what to do.
    """
    # raised by the plugin, not by Python
    says_what_to_do = isinstance(error, ImportError) and error.name is None
    reason, at = " ".join(str(error).split()), "" if says_what_to_do else raised_at(error)
    return StrategyError(f"{what} does not import: {type(error).__name__}: {reason}{at}")


GUARD = "if __name__ == '__main__':"
_importing: list[Path] = []
"""The files of users that are being imported. In the module, because so are Python's own: a file
that starts a run as it is imported must be seen by that run.
"""


@cache  # a class must be the same object whenever it is asked for
def _module_of(file: Path, changed: int) -> ModuleType:
    """Import a file; its time of modification, ``changed``, makes an edited file import again."""
    name = f"distcore_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module by name
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that it hides nothing
    _importing.append(file)
    try:
        with refuse_endings():
            spec.loader.exec_module(module)
    finally:
        _importing.remove(file)
    return module


def all_offers(group: str) -> list[EntryPoint]:
    """Return all entry points of a group, including blocked ones and
    duplicates of a distribution.
    """
    return [
        entry for entry in _ours(tuple(map(_state, sys.path))) if entry.group == f"distcore.{group}"
    ]


@lru_cache(maxsize=4)  # it reads a file of every distribution, and a command asks a dozen times
def _ours(places: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return all entry points for distcore; ``places`` changes when pip
    installs or removes a package.
    """
    ours: dict[str, Distribution] = {}
    for package in distributions():
        if "[distcore." in (package.read_text("entry_points.txt") or ""):
            # of two versions, Python imports the first on the path
            ours.setdefault(_identity(package)[0], package)
    entries = (entry for package in ours.values() for entry in package.entry_points)
    return tuple(entry for entry in entries if entry.group.startswith("distcore."))


def _state(place: str) -> tuple[str, int]:
    folder = os.path.abspath(place)
    try:
        return folder, os.stat(folder).st_mtime_ns
    except OSError:  # Python allows folders that do not exist
        return folder, 0


@cache  # the metadata is a long file
def _identity(package: Distribution) -> tuple[str, str]:
    facts = package.metadata  # parsed anew each time that it is asked for
    return facts["Name"], facts["Version"]


def _owner(entry: EntryPoint) -> str:
    return _identity(entry.dist)[0] if entry.dist else ""


def _blocked(entry: EntryPoint) -> bool:
    owner = _owner(entry)
    refused = set(filter(None, os.environ.get(BLOCK_VARIABLE, "").split(",")))
    if refused & {entry.name, owner}:
        return True
    allowed = os.environ.get("DISTCORE_LOAD_PLUGINS")
    return (
        allowed is not None and owner != CORE and not set(allowed.split(",")) & {entry.name, owner}
    )


def _missing(group: str, name: str, installed: Collection[str]) -> str:
    """Return the line about a plugin that is not among the ``installed`` ones."""
    kind = KINDS[group]
    if any(entry.name == name for entry in all_offers(group)):
        return (
            f"{kind} {name!r} is installed but blocked (by -p no:{name} or DISTCORE_LOAD_PLUGINS)"
        )
    listed = ", ".join(installed) or "none"
    return f"no {kind} named {name!r} (installed: {listed}){_remedy(group, name, installed)}"


def _remedy(group: str, name: str, installed: Collection[str]) -> str:
    """Return the end of the line about a missing plugin: what to write or install in its place."""
    if group == "tasks" and (name.endswith(".py") or ":" in name):
        file, _, cls = name.partition(":")
        reference = f"{file.removesuffix('.py')}.py:{cls or 'CLASS'}"
        return f"; a task of a file is named by both: --task {reference}"
    if group == "strategies" and name.endswith(".py"):
        return "; a strategy is installed: distcore new strategy NAME writes a package for yours"
    if group == "tasks" and not installed:
        command = hints.how_to_get(group)
        install = f". Install some with: {command}; or" if command else ";"
        return f"{install} train your own: --task file.py:Class"
    if command := hints.how_to_get(group, name):
        return f". Install it with: {command}"
    return hints.nearest(name, installed)


def is_installed(library: str) -> bool:
    """Return True if a module is there to be imported, without importing it.

    A folder of data with its name does not count, such as ``datasets`` beside a script: Python
    would import it as an empty package.
    """
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None
