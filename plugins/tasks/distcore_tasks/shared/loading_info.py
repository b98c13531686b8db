"""Names and shapes of the weights in a folder, compared with a model by transformers:
no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn


def loaded_by_names(
    model_class: Any, folder: Path, headers: Mapping[str, Tensor], **settings: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of ``model_class`` on the meta device as transformers loads ``folder``,
    and its loading info.

    It knows the older names of parameters in files, and what is tied. ``headers``: ``meta_tensors``
    of the folder; if it has none, transformers reads its other files. ``settings`` go to
    ``from_pretrained``.
    """
    weights: dict[str, Any] = {"state_dict": dict(headers)} if headers else {}
    with _device_maps_without_accelerate():
        model, info = model_class.from_pretrained(
            None if headers else folder,
            device_map="meta",  # every parameter, so that none gets storage
            local_files_only=True,
            output_loading_info=True,
            **weights,
            **settings,
        )
    return model, dict(info)


@contextmanager
def _device_maps_without_accelerate() -> Iterator[None]:
    """Have transformers take a ``device_map`` where accelerate is not installed.

    It refuses all of them then. It calls accelerate only to split a model over several devices or
    to leave parts on disk, and a map to one device asks for neither.
    """
    try:
        module: Any = import_module("transformers.integrations.accelerate")
    except ImportError:  # a transformers in which other code refuses
        yield
        return
    if module.is_accelerate_available():
        yield
        return
    with patch.object(module, "is_accelerate_available", lambda: True):
        yield
