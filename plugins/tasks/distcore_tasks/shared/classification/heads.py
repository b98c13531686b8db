"""The head of a model with weights: classes are numbered as it numbers them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from distcore import DataError
from distcore_tasks.shared.classification.labels import forms_problem, same_but_for_form
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import read_config

SHOWN = 8
"""Most classes that a line names."""


def in_order_of_head(labels: list[Any], options: TaskOptions) -> list[Any]:
    """Return the labels in the order of the head of ``--model``, if that has just these classes.

    Raises DataError for a label that the head has in another Unicode form.
    """
    head = classes_of_head(options)
    if alike := same_but_for_form([*head, *map(str, labels)]):
        raise DataError(
            f"data {options.data}: beside the head of model {options.model}, label"
            f" {forms_problem(*alike)}"
        )
    if sorted(head) != sorted(map(str, labels)):
        return labels
    by_name = {str(label): label for label in labels}
    return [by_name[name] for name in head]


def other_head(classes: Sequence[str], options: TaskOptions) -> Iterator[str]:
    """Yield a warning where the head has as many classes, but others or in another order.

    Its weights are then used by number.
    """
    head = classes_of_head(options)
    numbers = [str(number) for number in range(len(head))]
    is_named = head not in (numbers, [f"LABEL_{number}" for number in numbers])
    if len(head) == len(classes) and is_named and list(classes) not in (head, numbers):
        yield (
            f"model {options.model}: its head is for {_listed(head)}; its weights go on, by number,"
            f" for {_listed(classes)}"
        )


def _listed(names: Sequence[str]) -> str:
    """Return the first names."""
    listed = ", ".join(names[:SHOWN])
    return f"{listed}, …" if len(names) > SHOWN else listed


def classes_of_head(options: TaskOptions) -> list[str]:
    """Return the names of the classes that the head is for; none for a model without weights."""
    if options.from_scratch:
        return []
    names = read_config(options.model, options.model_folder()).get("id2label") or {}
    return [str(names[key]) for key in sorted(names, key=int)]
