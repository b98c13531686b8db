"""Make a config of a YAML file and changes, and write it as YAML again.

No other module copies a config.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from distcore import registry
from distcore.config.keys import with_new_names
from distcore.config.messages import unknown_key
from distcore.config.schema import Optimizer, RunConfig, Schedule
from distcore.config.short_keys import full_key, option_names, with_full_keys
from distcore.config.values import DEEPEST
from distcore.errors import ConfigError

NOT_THE_JOB = {"out", "overwrite", "resume", "resume_changed", "max_restarts"}
"""Keys of the run folder, left out of its config.yaml. The file can then train the same job again,
in a new folder.
"""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses brackets nested too deeply, and keys that stand
    twice in a mapping.

    PyYAML's time grows with the square of the depth of brackets. Python's recursion limit is no
    bound for it, because programs raise that limit.
    """

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Read an opening bracket; raises RecursionError if brackets are nested too deeply."""
        if self.flow_level > DEEPEST:
            raise RecursionError(f"more than {DEEPEST} brackets inside each other")
        super().fetch_flow_collection_start(token)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the keys and values of a mapping; raises ConstructorError for a key that
        it has twice.
        """
        seen: set[tuple[str, str]] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            # With its tag, because the number 1 and the text "1" are two keys.
            tagged_key = (key_node.tag, key)
            if tagged_key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(tagged_key)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """The job of a command: a config file, and overrides."""

    config: str | None
    """Path of a config file, or none."""
    changes: Mapping[str, Any]
    """Values by dotted key that override the file."""

    def load(self) -> RunConfig:
        """Return the config; raises ConfigError, as ``load_config``."""
        return load_config(self.config, dict(self.changes))


def load_config(file: str | None, changes: dict[str, Any]) -> RunConfig:
    """Build the config from a YAML file (or none) and dotted changes
    such as ``{"optimizer.eps": 1e-6}``.

    Raises ConfigError: one line with the dotted key, the value and the rule.
    """
    source = file or "command line"
    top_level_keys = RunConfig.model_fields
    tree = with_new_names(_read_yaml(Path(file))) if file else {}
    changes = with_new_names(changes)
    task = str(changes.get("task") or tree.get("task", "auto"))
    tree = with_full_keys(tree, top_level_keys, task, source)

    for part, model in (("optimizer", Optimizer), ("schedule", Schedule)):
        settings = tree.get(part)
        new_name = changes.get(f"{part}.name")
        if isinstance(settings, dict) and new_name not in (None, settings.get("name")):
            # The options in the file are those of the one that it names: another would refuse them.
            tree[part] = {
                key: value for key, value in settings.items() if key in model.model_fields
            }

    has_short_keys = any(dotted.partition(".")[0] not in top_level_keys for dotted in changes)
    # Only short keys need the names of the options, which import the task's module.
    options = option_names(task) if has_short_keys else {}
    for dotted, value in changes.items():
        _put(tree, full_key(dotted, top_level_keys, options), value)
    config = RunConfig.model_validate(tree, context={"source": source, "changes": changes})
    _refuse_keys_of_no_schedule(config, tree, source, changes)
    return config


def _refuse_keys_of_no_schedule(
    config: RunConfig, tree: object, source: str, changes: Collection[str]
) -> None:
    """Raise ConfigError, with the origin, for an option of a schedule that is no plugin: it has
    none. That of a plugin is checked once it is imported.
    """
    name = config.schedule.name
    if ".py:" in name or name in registry.offers("schedules"):
        return
    for option in config.schedule.options:
        key = f"schedule.{option}"
        origin = "command line" if key in changes else source
        raise ConfigError(f"{origin}: {unknown_key(RunConfig, key, tree, origin)}")


def canonical(dotted: str) -> str:
    """Return the full key that ``dotted`` is short for; any name may be an option of a task."""
    return full_key(dotted, RunConfig.model_fields)


def dump_config(config: RunConfig, *, defaults: bool = True) -> str:
    """Return the config as YAML for ``distcore train``; without ``defaults`` only the values
    that differ from them.
    """
    left_out = NOT_THE_JOB
    if not defaults:
        # A preset in the file would set the keys that are left out because they have defaults.
        left_out = NOT_THE_JOB | {"preset"}
    tree = config.model_dump(mode="json", exclude=left_out, exclude_defaults=not defaults)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys and values of a config file; raises ConfigError, with a hint if ``path``
    looks like the folder of a run, or like rows.
    """
    hint = ""
    if (path / "config.yaml").is_file():
        hint = f"; its config is {path / 'config.yaml'}"
    elif path.suffix not in ("", ".yaml", ".yml"):
        hint = f"; rows to train on are named by --data {path}"
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"config file {path}: cannot be read: {reason}{hint}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ConfigError(f"config file {path}{line}: not valid YAML: {problem}{hint}") from None
    except (ValueError, ArithmeticError, RecursionError) as error:
        # Valid YAML with a value that Python cannot hold: the 31st of June, a number too long.
        raise ConfigError(f"config file {path}: a value cannot be read: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"config file {path}: expected keys and values, found a {type(tree).__name__}{hint}"
        )
    return tree


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set the value of a dotted key in ``tree``, in place, with the groups that it needs."""
    *groups, leaf = _split(dotted)
    if not all((*groups, leaf)):
        raise ConfigError(
            f"--set {dotted}: expected a dotted key such as optimizer.weight_decay=0.1"
        )
    branch = tree
    for group in groups:
        below = branch.setdefault(group, {})
        if not isinstance(below, dict):
            raise ConfigError(
                f"--set {dotted}: {group} has a value of its own and no keys below it"
            )
        branch = below
    branch[leaf] = value


def _split(dotted: str) -> list[str]:
    """Return the parts of a dotted key. The name of an extension in a file is one part, although
    ``file.py:Class`` has a dot.
    """
    extension_in_file = re.fullmatch(r"extensions\.(.+\.py:\w+)(?:\.(\w+))?", dotted)
    if extension_in_file:
        name, option = extension_in_file.groups()
        return ["extensions", name, option] if option else ["extensions", name]
    return dotted.split(".")


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return ``config`` with ``changes``, values by dotted key such as ``schedule.warmup_steps``.

    Values are taken as they are: whoever decides them has checked them.
    """
    top_level_values: dict[str, Any] = {}
    values_by_group: dict[str, dict[str, Any]] = {}
    for dotted, value in changes.items():
        group, dot, key = dotted.partition(".")
        if dot:
            values_by_group.setdefault(group, {})[key] = value
        else:
            top_level_values[dotted] = value
    changed_groups = {
        group: _group_of(config, group).model_copy(update=values)
        for group, values in values_by_group.items()
    }
    return config.model_copy(update=top_level_values | changed_groups)


def is_open(config: RunConfig, dotted: str) -> bool:
    """Return True if no one has set the key: it has its default, or is "auto"."""
    group, _, key = dotted.rpartition(".")
    owner = _group_of(config, group) if group else config
    return key not in owner.model_fields_set or getattr(owner, key) == "auto"


def _group_of(config: RunConfig, name: str) -> BaseModel:
    """Return a group of keys by name, such as ``schedule``, with its type."""
    group: BaseModel = getattr(config, name)
    return group
