"""Find plugins by their metadata alone, and import only those that a run uses.

Plugins are entry points in the groups ``distcore.strategies``, ``.tasks``, ``.extensions``,
``.optimizers``, ``.schedules``, ``.launchers``, ``.rank_environments``, ``.exports``, ``.readers``,
``.commands`` and ``.suites``; a user types the name of an entry point. Those of ``.checkpoints``
are asked in turn; ``.adapters`` has ``lora``, ``.hosts`` ``hostfile``. ``distcore.default_task``
has one entry point, the task of a config without a task; ``distcore.default_extensions`` has those
of ``distcore.extensions`` that are on unless a config says false. ``DISTCORE_LOAD_PLUGINS=a,b``
allows only those names or distributions in addition to the core's (empty: no others). ``-p
no:NAME`` blocks a name or a distribution. Both take effect before any import. What would install a
plugin that is missing is not known here: the providers of ``distcore.hints`` tell it (hints.py).
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
    "schedules": "schedule",
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
    return {name: single(group, offered) for name, offered in offers(group).items()}


def offers(group: str) -> dict[str, list[EntryPoint]]:
    """Return, by name and sorted, all entry points of that name, one per
    distribution, without blocked ones.
    """

    def by_name(entry: EntryPoint) -> tuple[str, str]:
        return entry.name, distribution(entry)

    offered: dict[str, list[EntryPoint]] = {}
    for entry in sorted(all_offers(group), key=by_name):
        if not _is_blocked(entry):
            offered.setdefault(entry.name, []).append(entry)
    return offered


def single(group: str, offered: list[EntryPoint]) -> EntryPoint:
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
    offered: list[EntryPoint] = []
    for entries_of_name in offers("default_task").values():
        offered += entries_of_name
    offered.sort(key=distribution)
    how = "name one by --task NAME or --task file.py:Class"
    if not offered:
        command = hints.how_to_get("tasks")
        how = f"{command}, or {how}" if command else how
        missing = "no task is named, and nothing that is installed has a default one"
        raise StrategyError(f"{missing}: {how}")
    first, *others = offered
    if others:
        two = [f"{distribution(entry)} ({entry.name})" for entry in offered[:2]]
        both = " and ".join(two)
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
    check_name(group, name)
    # Other names may be provided twice: a run does not use them.
    entry = single(group, offers(group)[name])
    try:
        return entry.load()
    except Exception as error:  # a broken plugin may raise anything at import
        plugin = f"{KINDS[group]} {name!r} is installed ({distribution(entry)}) but"
        raise _broken(plugin, error) from error


def check_name(group: str, name: str) -> None:
    """Raise StrategyError, one line, if no plugin ``name`` is installed. Imports none; of a plugin
    of a file, the file must be there.
    """
    if ".py:" in name:
        _file_of(KINDS[group], name)
        return
    installed = offers(group)
    if name not in installed:
        raise StrategyError(_missing(group, name, installed))


def load_file(kind: str, reference: str) -> Any:
    """Return ``Class`` of ``path/to/file.py:Class``, a plugin that is not packaged.

    The file can import modules next to it. ``kind`` is for messages. Raises StrategyError, one
    line, if the file or class is missing, or does not import.
    """
    path, _, name = reference.rpartition(":")
    file = _file_of(kind, reference)
    try:
        module = _module_of(file.resolve(), file.stat().st_mtime_ns)
    except Exception as error:
        if GUARD in str(error):
            raise  # it names the file, and says what to do
        raise _broken(f"{kind} {reference!r}", error) from error
    named = getattr(module, name, None)
    # An optimizer may also be a function, and a schedule is one.
    if isinstance(named, type) or (kind in ("optimizer", "schedule") and named is not None):
        return named
    if kind == "schedule":
        functions = [other for other, value in vars(module).items() if callable(value)]
        problem = f"no function {name} in {path}{hints.nearest(name, functions)}"
        raise StrategyError(f"{kind} {reference!r}: {problem}")
    problem = f"no class {name} in {path}"
    if hasattr(module, name):
        problem = f"{name} in {path} is not a class"
    classes = [other for other, value in vars(module).items() if isinstance(value, type)]
    raise StrategyError(f"{kind} {reference!r}: {problem}{hints.nearest(name, classes)}")


def _file_of(kind: str, reference: str) -> Path:
    """Return the file of ``path/to/file.py:Class``; raises StrategyError if it is not there."""
    path, _, _ = reference.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise StrategyError(f"{kind} {reference!r}: no file {path}")
    return file


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
    # Python names the module that is missing; a plugin that raises the error does not.
    says_what_to_do = isinstance(error, ImportError) and error.name is None
    reason = " ".join(str(error).split())
    at = "" if says_what_to_do else raised_at(error)
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
    folders = tuple(map(_state_of_folder, sys.path))
    entries_of_all_groups = _distcore_entry_points(folders)
    return [entry for entry in entries_of_all_groups if entry.group == f"distcore.{group}"]


@lru_cache(maxsize=4)  # it reads a file of every distribution, and a command asks a dozen times
def _distcore_entry_points(folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return all entry points for distcore; ``folders`` changes when pip installs or removes a
    package.
    """
    packages: dict[str, Distribution] = {}
    for package in distributions():
        # Parsing the entry points of every distribution would take longer.
        if "[distcore." in (package.read_text("entry_points.txt") or ""):
            name, _ = _identity(package)
            # Of two versions, Python imports the first on the path.
            packages.setdefault(name, package)
    entries: list[EntryPoint] = []
    for package in packages.values():
        entries += [entry for entry in package.entry_points if entry.group.startswith("distcore.")]
    return tuple(entries)


def _state_of_folder(path: str) -> tuple[str, int]:
    """Return a folder and the time of its last change; 0 if there is none, which Python allows."""
    folder = os.path.abspath(path)
    try:
        return folder, os.stat(folder).st_mtime_ns
    except OSError:
        return folder, 0


@cache  # the metadata is a long file
def _identity(package: Distribution) -> tuple[str, str]:
    """Return name and version of a distribution."""
    metadata = package.metadata  # once: each access parses the file anew
    return metadata["Name"], metadata["Version"]


def _owner(entry: EntryPoint) -> str:
    """Return the name of the distribution that provides ``entry``; empty if it has none."""
    return _identity(entry.dist)[0] if entry.dist else ""


def _is_blocked(entry: EntryPoint) -> bool:
    """Return True for a plugin that ``-p no:NAME`` names, or that is not among those allowed."""
    owner = _owner(entry)
    names = {entry.name, owner}
    blocked = set(filter(None, os.environ.get(BLOCK_VARIABLE, "").split(",")))
    if blocked & names:
        return True
    allowed = os.environ.get("DISTCORE_LOAD_PLUGINS")
    if allowed is None or owner == CORE:
        return False
    return not names & set(allowed.split(","))


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
