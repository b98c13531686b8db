"""The flags of a task: one for each of its options, and those for nested options that its
class names in ``flags``.

They are found when a command line has a flag that is none of the command's own, and for ``--help``:
only then the module of the task is imported, without torch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distcore import registry
from distcore.cli.flags import OPTION, Flag, is_config
from distcore.errors import ConfigError
from distcore.plugin.options import Option, options_of

ARROWS = {"min": "↓", "max": "↑"}
NAMED = "str | dict[str, str]"
"""Type of an option that takes a text, or texts by name: its flag is
repeated, ``NAME=TEXT`` each time.
"""


class TaskFlags(NamedTuple):
    """Flags that a task adds to a command."""

    title: str
    """Title of their group in ``--help``."""
    about: str
    """Description of the task, below the title of the help."""
    flags: list[Flag]
    """The flags, in the order of the options."""
    readers: list[Callable[[str], Any]]
    """The function that reads the value of each flag."""


def named_task(argv: Sequence[str]) -> str:
    """Return the task that a command line or its config file names, else ``auto``."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # Values may be missing here: the parser of the command reports that.
    finder.add_argument("--task", nargs="?")
    finder.add_argument("--set", action="append", default=[], nargs="?", const="")
    finder.add_argument("--out", nargs="?")
    given, _ = finder.parse_known_args(list(argv))
    settings = [text.removeprefix("task=") for text in given.set if text.startswith("task=")]
    if settings and settings[-1]:
        return str(settings[-1])
    if given.task:
        return str(given.task)
    # The last file is that of a run which goes on.
    for file in (*filter(is_config, argv), f"{given.out}/config.yaml"):
        task = _task_of_file(file)
        if task:
            return task
    return "auto"


def _task_of_file(word: str) -> str | None:
    """Return the task that a config file names; ``None`` if it names none or is no config.

    It is found by a pattern: reading YAML, and what is wrong in it, is left to the command.
    """
    try:
        with Path(word).open(encoding="utf-8") as file:
            text = file.read(2**20)  # a word may also name data, of any size
    except (OSError, UnicodeDecodeError):
        return None
    match = re.search(r"""^task:[ \t]*["']?([^"'#\s]+)""", text, re.M)
    return match[1] if match else None


def task_flags(name: str, taken: Container[str]) -> TaskFlags:
    """Return the flags of a task, without those that are ``taken``; raises DistcoreError
    if it cannot be imported.

    ``name`` may be ``auto``, for the default task.
    """
    name = registry.default_task() if name == "auto" else name
    cls = registry.load("tasks", name)
    options = {option.name: option for option in options_of(cls)}
    # Of nested options, whose names have dots, those to which the task gives a flag.
    option_by_flag = {f"--{name.replace('_', '-')}": name for name in options if "." not in name}
    nested = getattr(cls, "flags", {})
    if isinstance(nested, Mapping):
        option_by_flag |= {f"--{flag}": option for flag, option in nested.items()}
    flags = []
    readers = []
    without_flag = dict(options)
    for flag, option_name in option_by_flag.items():
        if flag not in taken and option_name in options:
            option = options[option_name]
            flags.append(_flag(flag, option))
            readers.append(_reader(option.type))
            without_flag.pop(option_name, None)
    return TaskFlags(
        title=f"options of the task {name}",
        about=_about(cls, list(without_flag)),
        flags=flags,
        readers=readers,
    )


def _about(cls: type[object], without_flag: Sequence[str]) -> str:
    """Return what the help says about a task: its purpose, metrics, and options without a flag."""
    from distcore.plugin.task.task import declared_metrics

    purpose = first_sentence(cls)
    metrics = metrics_in_words(declared_metrics(cls))
    others = ""
    if without_flag:
        settings = [f"--set {option}=…" for option in without_flag]
        others = f"; without a flag: {', '.join(settings)}"
    return (
        f"{purpose}. Metrics: {metrics}; the best of one is kept with --set"
        f" checkpoints.best=NAME{others}"
    )


def first_sentence(cls: type[object]) -> str:
    """Return the first sentence of a class's docstring as plain text, up to a semicolon."""
    import inspect

    paragraph = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    sentence = " ".join(paragraph.split()).partition(". ")[0]
    return sentence.replace("``", "").partition(";")[0].rstrip(".")


def metrics_in_words(metrics: Mapping[str, str]) -> str:
    """Return metrics with an arrow for their direction: ``loss↓ accuracy↑``, which
    no line break parts.
    """
    return " ".join(f"{name}{ARROWS[direction]}" for name, direction in metrics.items()) or "none"


def _flag(name: str, option: Option) -> Flag:
    """Return the flag of an option; its help is the option's documentation."""
    default = re.sub(r"^'(.*)'$", r"\1", option.default) or "required"
    default = {"None": "none"}.get(default, default)
    help_text = option.doc.rstrip(".")
    return Flag(name, _takes(option.type), default, help_text, f"{OPTION}{option.name}")


def _takes(text: str) -> str:
    """Return the placeholder of a flag's value in the help, from the type of its option."""
    choices = re.findall(r"'([^']*)'", text)
    if text.startswith(NAMED):
        return "[NAME=]TEXT"
    if choices:
        return "|".join(choices)
    words = {"int": "N", "float": "X", "bool": "true|false", "str": "TEXT"}
    for kind, word in words.items():
        if text.startswith(kind):
            return word
    return "VALUE"


def _reader(text: str) -> Callable[[str], Any]:
    """Return the function that reads a value of this type: several values with commas,
    a tree as YAML.

    Texts and numbers stay as they are given: the task's own types read them, and errors
    show what was typed.
    """
    if text.startswith(("tuple", "list")):
        return _values
    return str if re.match(r"(str|int|float|bool|Path)\b|'", text) else _value


def _value(text: str) -> Any:
    from distcore.config import parse_value

    return parse_value(text)


def _values(text: str) -> Any:
    from distcore.config import parse_values

    return _value(text) if text.startswith("[") else parse_values(text)


class _AddNamed(argparse.Action):
    """Stores a text, or adds ``NAME=TEXT`` to those given before. A path with a folder before
    ``=`` is a text.
    """

    def __call__(
        self, parser: object, namespace: object, values: Any, option_string: str | None = None
    ) -> None:
        given = getattr(namespace, self.dest, None)
        name, equals, text = values.partition("=")
        # The name of a file may have an equals sign, too.
        if not equals or "/" in name or Path(values).exists():
            name, text = "", values
        if given is not None and not (name and isinstance(given, dict)):
            raise ConfigError(
                f"{option_string} {values}: give each a name, {option_string} NAME=FILE, or give"
                " one alone"
            )
        if name and given and name in given:
            raise ConfigError(
                f"{option_string} {values}: {name!r} is given twice; name each differently"
            )
        value = (given or {}) | {name: text} if name else text
        setattr(namespace, self.dest, value)


def add_to(group: argparse._ArgumentGroup, added: TaskFlags) -> dict[argparse.Action, Flag]:
    """Add the flags of a task to a parser's group, which is empty so far; return
    them by their actions.
    """
    group.title = added.title
    group.description = added.about
    actions = {}
    for flag, read in zip(added.flags, added.readers, strict=True):
        text = f"{flag.help} ({flag.key}; default: {flag.default})".replace("%", "%%")
        action = group.add_argument(
            flag.name,
            dest=flag.key,
            metavar=flag.takes,
            type=read,
            default=argparse.SUPPRESS,
            help=text,
            action=_AddNamed if "=" in flag.takes else "store",
        )
        actions[action] = flag
    return actions
