"""From a YAML file and changes to a config, and back to YAML; the one place
that copies a config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from distcore.config.keys import with_new_names
from distcore.config.schema import Optimizer, RunConfig
from distcore.config.short_keys import full_key, option_names, with_task_options
from distcore.config.values import DEEPEST
from distcore.errors import ConfigError

NOT_THE_JOB = {"out", "resume", "resume_changed", "max_restarts"}
"""Keys of the run folder, left out of its config.yaml. The file can then train the same job again,
in a new folder.
"""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with an end to brackets in brackets, and without keys that stand
    twice in a mapping.

    Its time grows by the square of the depth, and Python's recursion limit, which programs raise,
    does not bound that.
    """

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Read an opening bracket; raises RecursionError if brackets are nested too deeply."""
        if self.flow_level > DEEPEST:
            raise RecursionError(f"more than {DEEPEST} brackets inside each other")
        super().fetch_flow_collection_start(token)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the keys and values of a mapping; raises ConstructorError for a key that
        stands in it twice.
        """
        keys = [(key.tag, str(key.value)) for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                mark = node.value[at][0].start_mark
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key[1]!r} stands twice", mark
                )
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
    source, keys = file or "command line", RunConfig.model_fields
    tree = with_new_names(_read_yaml(Path(file))) if file else {}
    changes = with_new_names(changes)
    task = str(changes.get("task") or tree.get("task", "auto"))
    tree = with_task_options(tree, keys, task, source)
    optimizer, other = tree.get("optimizer"), changes.get("optimizer.name")
    # options of the one before
    if isinstance(optimizer, dict) and other not in (None, optimizer.get("name")):
        tree["optimizer"] = {
            key: value for key, value in optimizer.items() if key in Optimizer.model_fields
        }
    others = any(dotted.partition(".")[0] not in keys for dotted in changes)
    options = option_names(task) if others else ()
    for dotted, value in changes.items():
        _put(tree, full_key(dotted, keys, options), value)
    return RunConfig.model_validate(tree, context={"source": source, "changes": changes})


def canonical(dotted: str) -> str:
    """Return the full key that ``dotted`` is short for, if its task has such an option."""
    return full_key(dotted, RunConfig.model_fields)


def dump_config(config: RunConfig, *, defaults: bool = True) -> str:
    """Return the config as YAML for ``distcore train``; without ``defaults`` only the values
    that differ from them.
    """
    # A preset would come back as values, because the config omits values that are defaults.
    without = NOT_THE_JOB if defaults else NOT_THE_JOB | {"preset"}
    tree = config.model_dump(mode="json", exclude=without, exclude_defaults=not defaults)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path) -> dict[str, Any]:
    hint = (
        ""
        if path.suffix in ("", ".yaml", ".yml")
        else f"; rows to train on are named by --data {path}"
    )
    hint = f"; its config is {path / 'config.yaml'}" if (path / "config.yaml").is_file() else hint
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
        # of a value: the 31st of June, a number too long
        raise ConfigError(f"config file {path}: a value cannot be read: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"config file {path}: expected keys and values, found a {type(tree).__name__}{hint}"
        )
    return tree


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = _split(dotted)
    if not all((*parents, leaf)):
        raise ConfigError(
            f"--set {dotted}: expected a dotted key such as optimizer.weight_decay=0.1"
        )
    for parent in parents:
        branch = tree.setdefault(parent, {})
        if not isinstance(branch, dict):
            raise ConfigError(
                f"--set {dotted}: {parent} has a value of its own and no keys below it"
            )
        tree = branch
    tree[leaf] = value


def _split(dotted: str) -> list[str]:
    if own := re.fullmatch(r"extensions\.(.+\.py:\w+)(?:\.(\w+))?", dotted):
        return ["extensions", *filter(None, own.groups())]
    return dotted.split(".")


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return ``config`` with ``changes``, values by dotted key such as ``schedule.warmup_steps``.

    Values are taken as they are: whoever decides them has checked them.
    """
    own = {key: value for key, value in changes.items() if "." not in key}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, dot, rest = key.partition(".")
        if dot:
            inner.setdefault(group, {})[rest] = value
    groups = {
        group: _tree(config, group).model_copy(update=values) for group, values in inner.items()
    }
    return config.model_copy(update=own | groups)


def is_open(config: RunConfig, dotted: str) -> bool:
    """Return True if no one has set the key: it has its default, or is "auto"."""
    group, _, key = dotted.rpartition(".")
    tree = _tree(config, group) if group else config
    return key not in tree.model_fields_set or getattr(tree, key) == "auto"


def _tree(config: RunConfig, group: str) -> BaseModel:
    tree: BaseModel = getattr(config, group)
    return tree
