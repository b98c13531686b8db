"""Pages that are made from the code when the site is built: config keys,
options of strategies and extensions.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from distcore import registry
from distcore.cli.flags import FLAGS
from distcore.config import RunConfig, flatten
from distcore.config.key_help import GROUPS
from distcore.errors import StrategyError
from distcore.plugin.options import options_of
from distcore.plugin.strategy.argument import shorthand_of

Schema = dict[str, Any]


def config_page() -> str:
    """One table of the keys at the top, then one per tree of keys below them, as Markdown."""
    schema = RunConfig.model_json_schema()
    trees = {
        key: _tree(schema, field) for key, field in schema["properties"].items() if "$ref" in field
    }
    top = {key: field for key, field in schema["properties"].items() if key not in trees}
    parts = [_key_table(top)]
    for key, tree in trees.items():
        keys = {f"{key}.{name}": field for name, field in tree["properties"].items()}
        parts.append(f"**`{key}`**: {_prose(tree['description'])}\n\n{_key_table(keys)}")
    return "\n\n".join(parts)


def _tree(schema: Schema, field: Schema) -> Schema:
    tree: Schema = schema["$defs"][field["$ref"].rpartition("/")[2]]
    return tree


def _key_table(fields: dict[str, Schema]) -> str:
    flags = {flag.key: flag.name for flag in FLAGS}
    tree = RunConfig().model_dump(mode="json")
    defaults = tree | flatten(tree)
    rows = (
        (
            f"`{key}`",
            _type_of(field),
            f"`{_as_yaml(defaults[key])}`",
            _prose(field.get("description", "")),
            f"`{flags[key]}`" if key in flags else "`--set`",
        )
        for key, field in fields.items()
    )
    return _table(("key", "type", "default", "meaning", "flag"), rows)


def _type_of(field: Schema) -> str:
    """Describe a value by its JSON schema, in words: ``integer ≥ 1 or `auto```."""
    if "anyOf" in field:
        return " or ".join(map(_type_of, field["anyOf"]))
    if choices := field.get("enum") or [field[key] for key in ("const",) if key in field]:
        return ", ".join(f"`{choice}`" for choice in choices)
    if "$ref" in field:
        return "keys and values"
    if field["type"] == "array":
        inner = field.get("prefixItems") or [field["items"]]
        return f"list of {_type_of(inner[0])}" + (
            f", {len(inner)} of them" if "prefixItems" in field else ""
        )
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = " and ".join(f"{sign} {field[name]}" for name, sign in signs.items() if name in field)
    words = {"object": "keys and values", "null": "`null`", "string": "text"}
    return f"{words.get(field['type'], field['type'])} {limits}".strip()


def _as_yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def options_page(group: str) -> str:
    """One section per plugin of a group, such as ``strategies``: what it is, and a
    table of its options.
    """
    parts = []
    for name, offered in registry.offers(group).items():
        parts.append(f"### {name}")
        try:
            cls = registry.load(group, name)
        # A plugin may be unusable here, such as Horovod where it is not built; the other sections
        # are still made.
        except StrategyError as error:
            parts.append(f"Not on this page, which was made without it: {error}")
            continue
        parts += [*_introduction(group, name, cls, offered), _option_table(cls)]
    return "\n\n".join(parts)


def _introduction(
    group: str, name: str, cls: type[object], offered: list[EntryPoint]
) -> Iterator[str]:
    yield _prose(inspect.getdoc(cls) or "")
    words = [f"From `{entry.dist.name}`." for entry in offered if entry.dist]
    if group == "strategies" and (short := shorthand_of(name, cls)):
        words.append(f"`--strategy {name}:VALUE` sets `{short}`.")
    yield " ".join(words)


def _option_table(cls: type[object]) -> str:
    rows = [
        (f"`{option.name}`", f"`{option.type}`", f"`{option.default or 'required'}`", option.doc)
        for option in options_of(cls)
    ]
    return _table(("option", "type", "default", "meaning"), rows) if rows else "It has no options."


def _prose(docstring: str) -> str:
    """A docstring as Markdown: only its code marks differ."""
    return docstring.replace("``", "`")


def _table(headings: tuple[str, ...], rows: Any) -> str:
    escaped = (tuple(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows)
    lines = [headings, ("---",) * len(headings), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class ConfigReference(SphinxDirective):
    """``{config-reference}``: every key of the config."""

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # it depends on code, of which Sphinx knows nothing
        return self.parse_text_to_nodes(config_page())


class PluginOptions(SphinxDirective):
    """``{plugin-options} strategies``: the options of what is installed."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        return self.parse_text_to_nodes(
            options_page(self.arguments[0]), allow_section_headings=True
        )


def leave_out_keys(
    _app: Sphinx, _what: str, _name: str, shown: object, _options: object, lines: list[str]
) -> None:
    """Cut the keys off the docstring of a config: they have a page of their own."""
    first_group = f"{next(iter(GROUPS))}:"
    if shown is RunConfig and first_group in lines:
        del lines[lines.index(first_group) :]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", leave_out_keys)
    app.add_directive("config-reference", ConfigReference)
    app.add_directive("plugin-options", PluginOptions)
    return {"parallel_read_safe": True}
