"""What ``help(RunConfig)`` shows: the keys of a config in groups, and nothing of pydantic."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

GROUPS = {
    "what is trained": ("task", "task_options", "freeze", "lora", "ema"),
    "ranks": ("strategy", "strategy_options", "nproc", "device", "max_restarts", "timeout"),
    "steps and batches": (
        "epochs",
        "max_steps",
        "global_batch_size",
        "micro_batch_size",
        "micro_batch_tokens",
        "padding_free",
        "loader",
    ),
    "optimization": ("lr", "optimizer", "schedule", "clip"),
    "arithmetic": (
        "preset",
        "precision",
        "eval_precision",
        "tf32",
        "compile",
        "gradient_checkpointing",
        "dropout_masks",
        "seed",
        "deterministic",
        "exact",
        "threads",
    ),
    "evaluations and checkpoints": (
        "eval_every",
        "eval_at_epoch_end",
        "patience",
        "save_every",
        "checkpoints",
    ),
    "run folder": ("out", "overwrite", "resume", "resume_changed"),
    "checks, extensions and logs": (
        "prove",
        "data_guard_steps",
        "extensions",
        "log_every",
        "log_level",
        "log_level_replica",
    ),
}
"""The keys at the top of a config by what they are about."""
WIDTH = 96
"""Columns of a line; pydoc puts four before it."""
COLUMN = 30
"""Columns of a key and its default, before what it is."""
Config = TypeVar("Config", bound=type[BaseModel])


class KeysOnly(ModelMetaclass):
    """The type of a config: ``dir``, and with it ``help``, shows no methods of pydantic."""

    def __dir__(cls) -> list[str]:
        """Return the public names that a config has beside those of every model."""
        of_pydantic = {*dir(BaseModel)}
        return [
            name
            for name in super().__dir__()
            if not name.startswith("_") and name not in of_pydantic
        ]


class KeysSignature(inspect.Signature):
    """A signature for completion, whose text leaves the keys to the lines that explain them."""

    def __str__(self) -> str:
        return "(**keys)"

    def format(self, **_: object) -> str:
        """Return the text, as ``help`` of newer Pythons asks for it."""
        return str(self)


def described_by_keys(config: Config) -> Config:
    """Add the keys of ``config``, in groups, to its docstring."""
    model: type[BaseModel] = config
    lines = [inspect.cleandoc(config.__doc__ or "")]
    for title, keys in GROUPS.items():
        lines += ["", f"{title}:"]
        for key in keys:
            lines += _lines_about(key, model.model_fields[key])
    config.__doc__ = "\n".join(lines)
    signature = inspect.signature(config)
    config.__signature__ = KeysSignature([*signature.parameters.values()])
    return config


def _lines_about(key: str, field: FieldInfo) -> Iterator[str]:
    """Yield the lines about a key: its name and default, and what it is for; of a group also its
    keys.
    """
    about = field.description or ""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        about += f": {', '.join(kind.model_fields)}"
        default = ""
    else:
        default = f" = {field.get_default(call_default_factory=True)}"
    head = f"  {key}{default}".ljust(COLUMN + 2)
    yield from textwrap.wrap(f"{head} {about}", WIDTH, subsequent_indent=" " * (COLUMN + 3))
