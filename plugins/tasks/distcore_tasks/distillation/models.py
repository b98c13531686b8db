"""Check that a student and its teacher fit each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distcore import ModelError
from distcore_tasks.shared.bert import hidden_size
from distcore_tasks.shared.pretrained import load_tokenizer, read_config

if TYPE_CHECKING:
    from distcore_tasks.text_classification.options import TextOptions


def check_classes(teacher: TextOptions, classes: Sequence[str], data: str) -> None:
    """Raise ModelError, one line, unless the teacher has the classes of the rows,
    in the same order.
    """
    if teacher.from_scratch:
        return
    config = read_config(teacher.model, teacher.model_folder())
    names = config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # transformers' default
    classes_of_teacher = [str(names[key]) for key in sorted(names, key=int)]
    numbers = range(len(classes_of_teacher))
    # Without names, the teacher has those that transformers makes, in the order of numbers.
    is_without_names = classes_of_teacher == [f"LABEL_{number}" for number in numbers]
    are_numbers = list(classes) == [str(number) for number in numbers]
    if classes_of_teacher != list(classes) and not (is_without_names and are_numbers):
        raise ModelError(
            f"teacher {teacher.model}: its classes are {_first(classes_of_teacher)}, those of"
            f" {data} are {_first(classes)}; train it on these classes, or give rows its labels"
        )


def _first(classes: Sequence[str]) -> str:
    """Return the first classes, for an error message."""
    shown = ", ".join(classes[:8])
    return f"{shown}, …" if len(classes) > 8 else shown


def check_tokens(student: TextOptions, teacher: TextOptions) -> None:
    """Raise ModelError, one line, unless a student with weights has the teacher's vocabulary."""
    if student.from_scratch:
        return  # it is built for the teacher's tokens
    if teacher.from_scratch or _vocabulary(student) != _vocabulary(teacher):
        raise ModelError(
            f"model {student.model}: its tokens are not those of teacher {teacher.model}; take a"
            " student with the same tokenizer, or a built-in one"
        )


def check_sizes(student: TextOptions, teacher: TextOptions) -> None:
    """Raise ModelError, one line, if hidden states have other sizes."""
    sizes = [hidden_size(options) for options in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"hidden_weight: hidden states of {student.model} have {sizes[0]} values, those of"
            f" teacher {teacher.model} {sizes[1]}; leave it out, or take a student of that size"
        )


def _vocabulary(options: TextOptions) -> dict[str, int]:
    tokenizer: Any = load_tokenizer(options.model, options.model_folder())
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
