"""Where padding must stand so that a row's answer does not depend on the rows beside it."""

from __future__ import annotations

from distcore import ModelError
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import read_config

LAST_PLACE = ("xlnet",)
"""Model types that classify a row by its last place, be it padding or not."""
UNMASKED = ("canine", "convbert", "fnet", "nystromformer", "reformer", "yoso")
"""Model types in which padding takes part in the answer, on whichever side it stands."""


def pads_left(options: TaskOptions) -> bool:
    """Return True if padding must stand before the tokens of a row, not behind them.

    Not what the tokenizer says: it may say left for the sake of generation, and a model such as GPT-2, which numbers
    places from the left, would give other answers then.
    """
    return _model_type(options) in LAST_PLACE


def check_padding(options: TaskOptions) -> None:
    """Raise ModelError for a model whose answer for a row depends on the length that the row is padded to."""
    kind = _model_type(options)
    if kind in UNMASKED:
        raise ModelError(
            f"model {options.model}: {kind} lets padding take part in its answers, so they would depend on the rows "
            "beside; take another model"
        )


def _model_type(options: TaskOptions) -> object:
    return None if options.from_scratch else read_config(options.model, options.model_folder())["model_type"]
