"""Sequence packing: short rows of a batch share a sequence, and do not attend to each other.

Positions restart at 0 with each row. transformers derives the borders of rows from them, so the
model itself needs no change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from distcore import ConfigError, ModelError, OnResume
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.padding_free.supported_models import DECODERS, why_unknown
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import read_config

if TYPE_CHECKING:
    from distcore import RunConfig

UNPACKED = ("gpt_oss",)
"""Decoders whose masks transformers makes without positions.

Rows of a sequence would attend to each other.
"""
MODEL_TYPES = tuple(kind for kind in DECODERS if kind not in UNPACKED)
"""Model types for which a packed row has the same loss as a separate one.

A test builds each of them.
"""
SINCE = (4, 53)
"""First version of transformers that derives the borders of rows from positions."""


@dataclass(frozen=True, kw_only=True)
class PackingOptions(TaskOptions):
    """Options of a task that can pack its rows."""

    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "packing": "free",
        "split_documents": "other rows",
    }

    packing: Literal["auto", "on", "off"] = "auto"
    """Let short rows share a sequence; auto: as ``padding_free``, and if that is auto, too, where
    known to be exact.
    """
    split_documents: bool = False
    """Isolate documents inside a block from each other; needs ``packing``."""

    def suggest(self, config: RunConfig) -> dict[str, object]:
        """Return the learning rate, and ``padding_free`` if ``packing`` is set.

        Packed rows have no padding.
        """
        padding_free = {} if self.packing == "auto" else {"padding_free": self.packing}
        return super().suggest(config) | padding_free

    def packs(self, config: RunConfig) -> bool:
        """Return True if rows share sequences.

        With ``padding_free`` off, packing is off. Otherwise ``padding_free`` decides only if
        ``packing`` is 'auto'. Raises ConfigError if the two contradict each other, or if packing is
        off and ``split_documents`` needs it. Raises ModelError if packing is required but not known
        to be exact.
        """
        if self.packing == "auto" or config.padding_free == "off":
            key, packing = "padding_free", config.padding_free
        else:
            key, packing = "task_options.packing", self.packing
        if config.padding_free == "on" and packing == "off":
            raise ConfigError(
                "padding_free = 'on': task_options.packing = 'off' pads rows; leave one of them out"
            )
        if packing == "off":
            if self.split_documents:
                raise ConfigError(
                    f"{key} = 'off': task_options.split_documents needs packed rows; leave one of"
                    " them out"
                )
            return False
        reason = self._why_not()
        if reason is None:
            return True
        if packing == "on":
            needed_by = f"{key} = 'on'"
        elif self.split_documents:
            needed_by = "task_options.split_documents = true"
        else:
            return False
        raise ModelError(
            f"{needed_by}: model {self.model}: packing is not known to be exact: {reason}"
        )

    def _why_not(self) -> str | None:
        """Return the reason why packing may be inexact for the model; ``None`` if it is exact."""
        config: Mapping[str, Any]
        built_in = SHAPES.get(self.model)
        if built_in:
            config = {"model_type": built_in.family}
        else:
            config = read_config(self.model, self.model_folder())
        if reason := why_unknown(config, MODEL_TYPES):
            return reason
        installed = version("transformers")
        major_and_minor = tuple(int(part) for part in installed.split(".")[:2])
        if major_and_minor < SINCE:
            return f"transformers {installed} has no packed rows; install 4.53 or newer"
        return None


def allow_no_mask() -> None:
    """Silence the warning of transformers about padding tokens without an attention mask.

    Packed rows need none.
    """
    logging.getLogger("transformers.modeling_utils").addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    """Return False for the warning of transformers that recommends an attention mask."""
    return "We strongly recommend passing in an `attention_mask`" not in str(record.msg)
