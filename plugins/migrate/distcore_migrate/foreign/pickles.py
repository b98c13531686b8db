"""Files that ``torch.save`` wrote: only tensors, numbers, texts and containers of them are loaded.

DeepSpeed's files name a few classes of its own. Classes of ours, which hold values and do nothing,
stand in for them; DeepSpeed itself is not imported.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from distcore import ConfigError


class Values:
    """Attributes of an object, without its class."""


class Stage(int):
    """A stage of ZeRO."""


class LossScaler(Values):
    """The loss scale of fp16; ``cur_scale`` has it."""


STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (Values, "deepspeed.utils.tensor_fragment.fragment_address"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
"""All classes that a file may name beside torch's own, with what is made in their place."""


def load(file: Path) -> dict[str, Any]:
    """Return the dictionary in a file; raises ConfigError, one line, for anything else."""
    tree = load_any(file)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"checkpoint file {file}: expected a dictionary, found {type(tree).__name__}"
        )
    return tree


def load_any(file: Path, part: BytesIO | None = None) -> Any:
    """Return the contents of a file, or of a ``part`` of it; raises ConfigError, one line."""
    try:
        with torch.serialization.safe_globals(STAND_INS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the protocol of a pickle that is refused below
            return torch.load(part or file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ConfigError(
            f"checkpoint file {file}: cannot be read: {error.strerror or error}"
        ) from None
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"checkpoint file {file}: {_why(str(error))}; nothing of it was run"
        ) from None
    except Exception as error:  # a damaged file raises whatever its bytes lead to
        line = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"checkpoint file {file}: damaged: {type(error).__name__}: {line}"
        ) from None


def _why(text: str) -> str:
    named = re.search(r"GLOBAL (\S+)", text) or re.search(r"(?:function|got) <\w+ '?([^'>]+)", text)
    name = named.group(1) if named else "an object"
    return f"refused: its pickle asks for {name}, and only tensors, numbers and texts are loaded"


@contextmanager
def malformed(where: object) -> Iterator[None]:
    """Raise ConfigError, one line, where a dictionary has not what its format says."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        line = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"checkpoint {where}: not of its format: {type(error).__name__}: {line}"
        ) from None


def scale_of(scaler: object) -> Mapping[str, Any]:
    """Return a loss scale as a GradScaler has it; empty where there is none, or a constant one."""
    if isinstance(scaler, dict):
        return {key: value for key, value in scaler.items() if isinstance(value, int | float)}
    scale = getattr(scaler, "cur_scale", None)
    return (
        {"scale": float(scale)}
        if isinstance(scale, int | float) and getattr(scaler, "dynamic", False)
        else {}
    )
