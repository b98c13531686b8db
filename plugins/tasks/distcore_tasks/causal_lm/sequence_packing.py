"""Sequence packing: short rows of a batch share a sequence, and see nothing of each other.

Positions begin again at 0 with each row, and transformers keeps rows apart by that. Packing lays rows out; it needs
nothing of the model but such positions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator

from distcore import ConfigError, ModelError, OnResume
from distcore_tasks.causal_lm.dataset import FIRST, Column, SequenceDataset
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.shared.jagged import IGNORED
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import read_config

if TYPE_CHECKING:
    from torch import Tensor

    from distcore import RunConfig

MODEL_TYPES = ("gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "gemma", "olmo2", "smollm3")
"""Model types in which a packed row is known to have the loss that it has alone: a test builds each of them."""
SINCE = (4, 53)
"""The first transformers that finds the borders of rows in their positions."""
BOOL = BeforeValidator(lambda given: ("off", "on")[given] if isinstance(given, bool) else given)
"""YAML reads on and off as booleans."""


@dataclass(frozen=True, kw_only=True)
class PackingOptions(TaskOptions):
    """The options of a task that may pack its rows."""

    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "packing": "free",
        "split_documents": "other rows",
    }

    packing: Annotated[Literal["auto", "on", "off"], BOOL] = "auto"
    """Whether short rows share a sequence; auto: as ``padding_free`` says, or where that is known to be exact."""
    split_documents: bool = False
    """Whether a document sees nothing of the one before it in its block; needs ``packing``."""

    def suggest(self, config: RunConfig) -> dict[str, object]:
        """Return the learning rate, and ``padding_free`` where ``packing`` is set: packed rows have no padding."""
        padding_free = {} if self.packing == "auto" else {"padding_free": self.packing}
        return super().suggest(config) | padding_free

    def packs(self, config: RunConfig) -> bool:
        """Return True if rows share sequences; raises ModelError where that is asked for, and not known to be exact.

        ``padding_free`` of the config turns packing off if it is off; else it decides where ``packing`` is 'auto'.
        Raises ConfigError if the two contradict each other, or packing is off and ``split_documents`` needs it.
        """
        key = "padding_free" if self.packing == "auto" or config.padding_free == "off" else "task_options.packing"
        packing = config.padding_free if key == "padding_free" else self.packing
        if config.padding_free == "on" and packing == "off":
            raise ConfigError("padding_free = 'on': task_options.packing = 'off' pads rows; leave one of them out")
        if packing == "off":
            if self.split_documents:
                raise ConfigError(
                    f"{key} = 'off': task_options.split_documents needs packed rows; leave one of them out"
                )
            return False
        reason = self._why_not()
        if reason is None:
            return True
        split = "task_options.split_documents = true" if self.split_documents else None
        if needed_by := f"{key} = 'on'" if packing == "on" else split:
            raise ModelError(f"{needed_by}: model {self.model}: packing is not known to be exact: {reason}")
        return False

    def _why_not(self) -> str | None:
        """Return why packing is not known to be exact for the model; ``None`` if it is."""
        built_in = SHAPES.get(self.model)
        kind = built_in.family if built_in else read_config(self.model, self.model_folder())["model_type"]
        if kind not in MODEL_TYPES:
            return f"{kind} is none of {', '.join(MODEL_TYPES)}"
        if tuple(int(part) for part in version("transformers").split(".")[:2]) < SINCE:
            return f"transformers {version('transformers')} has no packed rows; install 4.53 or newer"
        return None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class PackedDataset(SequenceDataset):
    """Rows that share sequences."""

    rows: SequenceDataset
    """The same rows, each padded."""
    split_documents: bool = False
    """Whether a document sees nothing of the one before it in its row, which padded rows cannot have."""
    tells_targets: bool = False
    """Whether batches say where their targets are."""

    @property
    def pads(self) -> bool:
        """False: a batch has no more tokens than its rows, up to the last gaps of its sequences."""
        return False

    def padded(self) -> SequenceDataset | None:
        """Return the same rows, each padded; ``None`` if they have documents that only packing keeps apart."""
        return None if self.split_documents else self.rows

    def with_targets(self) -> PackedDataset:
        """Return the same rows, in batches that say where targets are.

        Itself where every position is a target, and where only packing keeps documents apart.
        """
        some = not self.split_documents and int(self.items.sum()) < int(self.lengths.sum())
        return replace(self, tells_targets=True) if some else self

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the rows ``indices`` as ``SequenceDataset`` does, in tables ``(sequences, longest)``.

        As many rows are in a sequence as fit beside the longest. ``position_ids``, which begin again at 0 with each
        row, take the place of ``attention_mask``. If they are to be told, ``targets`` is where in ``labels``,
        flattened, there are targets, ``(targets,)``.
        """
        batch = SequenceDataset.batch(self, indices)  # super() does not know a class with slots
        if self.tells_targets:
            batch["targets"] = (batch["labels"].flatten() != IGNORED).nonzero()[:, 0]
        return batch

    def _layout(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return pack(lengths)

    def _order(self, offset: np.ndarray, flags: np.ndarray) -> dict[str, Column]:
        # What fills up a sequence is at position 0, too: a row of its own, which no other sees.
        return {"position_ids": (_positions(offset, flags), 0)}


def pack_dataset(rows: SequenceDataset, *, split_documents: bool) -> PackedDataset:
    """Return ``rows`` so that short ones share a sequence."""
    # Packed rows have no mask, and need none; transformers takes the token that fills up a sequence for a mistake.
    logging.getLogger("transformers.modeling_utils").addFilter(_is_shown)
    own = {name: getattr(rows, name) for name in SequenceDataset.__dataclass_fields__}
    return PackedDataset(**own, rows=rows, split_documents=split_documents)


def pack(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequence of each row, and where in it the row begins, both int64, ``(n,)``.

    First fit decreasing: the longest rows first, each into the first sequence that has room for it.
    """
    sequence, begin = np.zeros_like(lengths), np.zeros_like(lengths)
    filled, longest = list[int](), int(lengths.max(initial=0))
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        free = (number for number, size in enumerate(filled) if size + length <= longest)
        number = next(free, len(filled))
        if number == len(filled):
            filled.append(0)
        sequence[row], begin[row] = number, filled[number]
        filled[number] += length
    return sequence, begin


def _positions(offset: np.ndarray, flags: np.ndarray) -> np.ndarray:
    """Return the place of each token in its row, or in its document where documents are apart."""
    here = np.arange(len(offset))
    begins = (offset == 0) | ((flags & FIRST) > 0)
    positions: np.ndarray = here - np.maximum.accumulate(np.where(begins, here, 0))
    return positions


def _is_shown(record: logging.LogRecord) -> bool:
    """Return False for the message of transformers that recommends an attention mask."""
    return "We strongly recommend passing in an `attention_mask`" not in str(record.msg)
