"""Problem types: one class, several classes, or a number for each text."""

from distcore_tasks.text_classification.problems.contract import Problem
from distcore_tasks.text_classification.problems.multi_label import MultiLabel
from distcore_tasks.text_classification.problems.regression import Regression
from distcore_tasks.text_classification.problems.single_label import SingleLabel

PROBLEMS: dict[str, Problem] = {
    "single_label": SingleLabel(),
    "multi_label": MultiLabel(),
    "regression": Regression(),
}
"""The problem types, by their names in ``task_options.problem_type``."""
