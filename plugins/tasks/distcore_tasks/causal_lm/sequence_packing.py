"""Sequence packing: short rows of a batch share a sequence, and do not attend to each other.

Positions restart at 0 with each row. transformers derives the borders of rows from them, so the
model itself needs no change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from distcore import ConfigError, ModelError, OnResume
from distcore_tasks.causal_lm.dataset import FIRST, Column, SequenceDataset
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.padding_free.supported_models import DECODERS, why_unknown
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import read_config

if TYPE_CHECKING:
    from torch import Tensor

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


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PackedDataset(SequenceDataset):
    """Rows that share sequences."""

    rows: SequenceDataset
    """The same rows with padding."""
    split_documents: bool = False
    """True if documents inside a row are isolated from each other. Padded rows cannot have that."""
    tells_targets: bool = False
    """True if batches contain the positions of their targets."""

    @property
    def pads(self) -> bool:
        """False: only the ends of sequences may have some padding."""
        return False

    def padded(self) -> SequenceDataset | None:
        """Return the same rows with padding; ``None`` if only packing isolates documents."""
        return None if self.split_documents else self.rows

    def with_targets(self) -> PackedDataset:
        """Return the same rows, with target positions in the batches.

        Returns itself if every position is a target, or if only packing can isolate documents.
        """
        if self.split_documents:
            return self
        has_other_positions = int(self.items.sum()) < int(self.lengths.sum())
        return replace(self, tells_targets=True) if has_other_positions else self

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices`` as ``SequenceDataset`` does, ``(sequences, longest)``.

        A sequence holds as many rows as fit into the length of the longest. ``position_ids``, which
        restart at 0 with each row, replace ``attention_mask``; ``place`` is that of a token in its
        row, and ``token_mask`` is 0 for padding. With ``tells_targets``, ``targets``,
        ``(targets,)``, has the positions of targets in the flattened ``labels``.
        """
        batch = SequenceDataset.batch(self, indices)  # super() fails in a dataclass with slots
        if self.tells_targets:
            batch["targets"] = (batch["labels"].flatten() != IGNORED).nonzero()[:, 0]
        return batch

    def _layout(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return pack(lengths)

    def _order(self, offset: np.ndarray, flags: np.ndarray) -> dict[str, Column]:
        """Return the columns that define attention, without a mask.

        ``offset``: place of each token in its row. ``flags``: those of its token.
        """
        # Padding has position 0, too: each padding token is a row of its own, and no other row
        # attends to it.
        columns = {
            "position_ids": _positions(offset, flags),
            "place": offset,
            "token_mask": np.ones_like(offset),
        }
        return {name: (values, 0) for name, values in columns.items()}


def pack_dataset(rows: SequenceDataset, *, split_documents: bool) -> PackedDataset:
    """Return ``rows`` with short ones packed into shared sequences."""
    # Packed rows need no mask, but transformers warns about padding tokens without one.
    logging.getLogger("transformers.modeling_utils").addFilter(_is_shown)
    fields = {name: getattr(rows, name) for name in SequenceDataset.__dataclass_fields__}
    return PackedDataset(**fields, rows=rows, split_documents=split_documents)


def pack(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequence of each row, and its start in the sequence, both int64, ``(n,)``.

    First-fit decreasing bin packing: the longest rows first, each into the first sequence
    with room for it.
    """
    sequence, begin = np.zeros_like(lengths), np.zeros_like(lengths)
    longest = int(lengths.max(initial=0))
    sizes = list[int]()  # tokens of each sequence
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        with_room = (number for number, size in enumerate(sizes) if size + length <= longest)
        number = next(with_room, len(sizes))
        if number == len(sizes):
            sizes.append(0)
        sequence[row], begin[row] = number, sizes[number]
        sizes[number] += length
    return sequence, begin


def _positions(offset: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Return the position of each token in its row, or in its document if these are isolated."""
    numbers = np.arange(len(offset))
    is_first = (offset == 0) | ((flags & FIRST) > 0)
    # Number of the last first token up to each token.
    begins = np.maximum.accumulate(np.where(is_first, numbers, 0))
    positions: np.ndarray = numbers - begins
    return positions


def _is_shown(record: logging.LogRecord) -> bool:
    """Return False for the warning of transformers that recommends an attention mask."""
    return "We strongly recommend passing in an `attention_mask`" not in str(record.msg)
