"""Compare the weights in a model's folder with the model that a task builds: only a new head
may have no match.

transformers gives random values to each parameter that the files lack, whether that is a new head
or half of the layers. Training from such a mixture ends without an error and with worse figures.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from distcore import ModelError

log = logging.getLogger("distcore")


def check_matched(name: str, model: Any, report: Mapping[str, Any]) -> None:
    """Raise ModelError, one line, if the files of model ``name`` lack more of
    ``model`` than a head.

    ``report`` is the loading info of transformers: ``missing_keys``, ``unexpected_keys``, and
    ``mismatched_keys``, a tuple for each that begins with the parameter's name. A new head is named
    in the log.
    """
    parameters = {path for path, _ in model.named_parameters(remove_duplicate=False)}
    not_loaded = set(report["missing_keys"])
    not_loaded.update(path for path, *_ in report["mismatched_keys"])
    new = parameters & not_loaded
    unmatched = sorted(path for path in new if not _is_head(model, path))
    if not unmatched:
        # Tasks with a bare encoder leave out its pooler.
        if heads := sorted(path for path in new if not path.startswith("pooler.")):
            say_once(f"model {name}: new weights for its head: {_first(heads)}")
        return
    unused = sorted(report["unexpected_keys"])
    instead = f"; what they have instead: {_first(unused)}" if unused else ""
    raise ModelError(
        f"model {name}: its files lack {len(unmatched)} of the {len(parameters)} parameters of a"
        f" {type(model).__name__}, which would stay random: {_first(unmatched)}{instead}; rename"
        " the tensors in the files, or take a model of this kind"
    )


@cache
def say_once(line: str) -> None:
    """Log ``line`` the first time in this process; a rank may build a model on the meta device, and
    the model after it.
    """
    log.info("%s", line)


def _is_head(model: Any, path: str) -> bool:
    """Return True for a parameter after the base model: a classifier, a language
    model's output, a pooler.
    """
    base = model.base_model_prefix
    outputs = model.get_output_embeddings()
    if outputs is not None:
        for name, module in model.named_modules():
            if module is outputs and path.startswith(f"{name}."):
                return True
    if "pooler" in path.split("."):
        return True
    return base in dict(model.named_children()) and not path.startswith(f"{base}.")


def _first(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
