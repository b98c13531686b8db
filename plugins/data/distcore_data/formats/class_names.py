"""Names of classes: what the features of datasets, in the schema of Arrow and Parquet files,
say that numbers mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Name = Callable[[Any], Any]
"""Return a value with the names of classes in place of their numbers. Raises ValueError for
a number without one.
"""
SCHEMA_KEY = b"huggingface"
"""Key of the metadata of a schema under which datasets keeps its features, as JSON."""
LISTS = ("Sequence", "List", "LargeList")
"""Types of features whose values are lists."""


def column_names(schema: Any, column: str, top: str) -> Name | None:
    """Return what names the classes in the values of a column; ``None`` if there are none.

    ``top``: the column of the schema itself, or that which ``column``, a name with
    dots, is inside of.
    """
    try:
        feature = json.loads((schema.metadata or {})[SCHEMA_KEY])["info"]["features"][top]
    except (KeyError, TypeError, ValueError):
        return None
    for key in [] if column == top else column.split(".")[1:]:
        feature = _inner(feature, key)
    return _names_of(feature)


def _inner(feature: Any, key: str) -> Any:
    """Return the feature of a key of a struct, or of a list of structs, which datasets keeps as
    a struct of lists.
    """
    element = _element(feature)
    if element is not None:
        return [_inner(element, key)]
    return feature.get(key) if isinstance(feature, dict) else None


def _element(feature: Any) -> Any:
    """Return the feature of the elements of a list; ``None`` for a feature of other values."""
    if isinstance(feature, list) and len(feature) == 1:
        return feature[0]
    if isinstance(feature, dict) and feature.get("_type") in LISTS:
        return feature.get("feature")
    return None


def _names_of(feature: Any) -> Name | None:
    """Return what names the classes in a value of this feature, in lists and structs, too."""
    element = _element(feature)
    if element is not None:
        return _names_in_list(element)
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") == "ClassLabel":
        names = feature.get("names")
        return _name_of_class(list(map(str, names))) if isinstance(names, list) else None
    if isinstance(feature.get("_type"), str):
        return None
    return _names_in_struct(feature)


def _name_of_class(names: Sequence[str]) -> Name:
    def name(value: Any) -> Any:
        if type(value) is not int:
            return value
        if value == -1:  # the number of no label in datasets
            return None
        if not 0 <= value < len(names):
            raise ValueError(
                f"label {value} is out of range: the dataset names {len(names)} classes"
            )
        return names[value]

    return name


def _names_in_list(element: Any) -> Name | None:
    """Return what names the classes in a list. Its values may be a struct of lists if
    its elements are structs.
    """
    of_element = _names_of(element)
    if of_element is None:
        return None
    fields = isinstance(element, dict) and not isinstance(element.get("_type"), str)
    of_lists = (
        _names_in_struct({key: [inner] for key, inner in element.items()}) if fields else None
    )

    def name(value: Any) -> Any:
        if isinstance(value, dict):
            return of_lists(value) if of_lists else value
        return list(map(of_element, value)) if isinstance(value, list) else value

    return name


def _names_in_struct(fields: Mapping[str, Any]) -> Name | None:
    of_fields = {key: names for key, feature in fields.items() if (names := _names_of(feature))}
    if not of_fields:
        return None

    def name(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: of_fields[key](inner) if key in of_fields else inner
            for key, inner in value.items()
        }

    return name
