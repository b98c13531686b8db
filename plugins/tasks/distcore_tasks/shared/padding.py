"""The side of padding that keeps a row's prediction independent of the rest of the batch."""

from __future__ import annotations

from distcore import ModelError
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import read_config

LAST_PLACE = ("xlnet",)
"""Model types that classify a row by its last place, even if it is padding."""
UNMASKED = ("canine", "convbert", "fnet", "nystromformer", "reformer", "yoso")
"""Model types whose predictions depend on padding, on either side."""


def pads_left(options: TaskOptions) -> bool:
    """Return True if padding must come before the tokens of a row, not after them.

    Ignores the tokenizer's own side, which may be left for generation. A model such as GPT-2, which
    numbers positions from the left, would predict differently then.
    """
    return _model_type(options) in LAST_PLACE


def check_padding(options: TaskOptions) -> None:
    """Raise ModelError for a model whose prediction for a row depends on the padding of the row."""
    kind = _model_type(options)
    if kind in UNMASKED:
        raise ModelError(
            f"model {options.model}: {kind} lets padding take part in its answers, so they would"
            " depend on the rows beside; take another model"
        )


def _model_type(options: TaskOptions) -> object:
    return (
        None
        if options.from_scratch
        else read_config(options.model, options.model_folder())["model_type"]
    )
