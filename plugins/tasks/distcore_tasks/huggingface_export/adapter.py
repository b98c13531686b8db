"""An adapter as the folder that peft reads."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from distcore.model import silence_transformers

WEIGHTS = "adapter_model.safetensors"
"""The file of the adapter's weights, as peft calls it."""
BASE = "base"
"""Folder next to the adapter for a base without a folder of its own."""
PREFIX = "base_model.model."
"""Begins the name of each weight in ``WEIGHTS``."""


def write_adapter(to: Path, module: Any, base: str | None) -> None:
    """Write the adapter of ``module`` and its fully trained modules to the
    folder ``to``, for ``peft``.

    ``base`` is the name or folder of the base model. Without it the weights of the base are written
    into ``BASE``, and the adapter is removed from ``module``.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    from distcore_lora import take_out

    to.mkdir(parents=True, exist_ok=True)
    [(name, settings)] = module.peft_config.items()
    settings.inference_mode = True
    settings.base_model_name_or_path = base or str((to / BASE).absolute())
    if not isinstance(settings.target_modules, str):
        # a set, whose order would differ each time
        settings.target_modules = sorted(settings.target_modules)
    statistics = _with_statistics(module)
    # peft saves what is trained, and running statistics are moved by training without being that
    if statistics:
        settings.modules_to_save = sorted({*(settings.modules_to_save or ()), *statistics})
    if settings.task_type is None:  # peft then asks for the class
        kind = type(module)
        settings.auto_mapping = {
            "base_model_class": kind.__name__,
            "parent_library": kind.__module__,
        }
    settings.save_pretrained(to)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = get_peft_model_state_dict(module, adapter_name=name, save_embedding_layers=False)
    for path in statistics:
        tensors |= {
            f"{path}.{name}": value
            for name, value in module.get_submodule(path).state_dict().items()
        }
    contiguous = {
        f"{PREFIX}{path}": tensor.detach().contiguous() for path, tensor in tensors.items()
    }
    save_file(contiguous, to / WEIGHTS, metadata={"format": "pt"})
    if base is None:
        with silence_transformers():
            take_out(module, merge=False).save_pretrained(to / BASE)


def _with_statistics(module: Any) -> list[str]:
    """Return the names of the modules whose saved buffers training moves, as
    those of batch normalization.
    """
    from peft.utils import ModulesToSaveWrapper

    wrapped: list[str] = []
    layers = []
    for path, part in module.named_modules():
        if isinstance(part, ModulesToSaveWrapper):
            wrapped.append(f"{path}.")
        # Not else: a wrapper has the attributes of the module in it.
        if getattr(part, "track_running_stats", False):
            layers.append(path)
    # What is inside of a wrapper is saved whole.
    return [path for path in layers if not path.startswith(tuple(wrapped))]
