"""Rows of texts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from distcore_data import Record, describe_value
from distcore_tasks.rows.pipeline import BatchInfo, Encoded, Refuse, RowPipeline, TokenizerInfo
from distcore_tasks.rows.table import CachedTable, Rows
from distcore_tasks.shared.arrays import digest_arrays
from distcore_tasks.shared.jagged import flat_digest
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import load_tokenizer, set_pad_token
from distcore_tasks.shared.sources import text_problem

if TYPE_CHECKING:
    from torch import Tensor

Texts = tuple[str, ...]
"""The texts of a row, one per column."""
END = "<|end|>"
"""The end token of a tokenizer that is trained on the rows."""
OTHERS = {field.name for field in fields(TaskOptions)} | {"columns", "tokenizer"}
"""Options that say where rows come from, in which order, and who reads them: the key of the cache
has them already, or does not need them.
"""


@dataclass(frozen=True)
class TextRows(RowPipeline[Texts]):
    """Rows of texts, none of them blank, in the columns that ``options.columns`` names.

    Columns in ``numbers`` have a number in place of a text. A row is tokenized as a model reads one
    text or a pair of texts, unless a subclass says otherwise in ``encode``.

    Example::

        @dataclass(frozen=True)
        class ScoredPairs(TextRows):
            numbers = ("score",)
    """

    kind: ClassVar[str] = "own-texts"
    numbers: ClassVar[tuple[str, ...]] = ()
    """Columns with a number, by their config keys without ``columns.``."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Return the columns by config key."""
        return {f"columns.{key}": name for key, name in asdict(self.options.columns).items()}

    @property
    def settings(self) -> Sequence[object]:
        """Return all options that a subclass of ``TaskOptions`` has added: whichever of them
        ``encode`` reads, its rows are made anew when it changes.
        """
        own = {
            name: repr(value) for name, value in vars(self.options).items() if name not in OTHERS
        }
        return [own, list(self.numbers)]

    def content(self, table: CachedTable) -> str:
        """Return the digest of the tokens, and of rows of one's own that of all columns, so that
        none can change on a resume.
        """
        if not self.code:
            return super().content(table)
        digest = hashlib.sha256()
        for name, column in sorted(table.columns.items()):
            if isinstance(column, np.ndarray):
                entries = digest_arrays(column, widen=True)
            else:
                entries = flat_digest(table.flat(name))
            digest.update(f"{name} {entries}\n".encode())
        return digest.hexdigest()

    def size(self, value: Texts) -> int:
        """Return how many characters have to be encoded for a value."""
        return sum(len(part) for part in value if isinstance(part, str))

    def check(self, record: Record) -> str | None:
        """Return the problem of the first text that cannot be tokenized, or of a number."""
        for key, value in zip(self.columns, record, strict=True):
            name = key.removeprefix("columns.")
            if (
                problem := _number_problem(value, name)
                if name in self.numbers
                else text_problem(value, name)
            ):
                return problem
        return None

    def value(self, record: Record) -> Texts:
        """Return the texts, and numbers as floats."""
        names = [key.removeprefix("columns.") for key in self.columns]
        values = zip(names, record, strict=True)
        row: Any = tuple(
            float(str(value)) if name in self.numbers else str(value) for name, value in values
        )
        return row  # type: ignore[no-any-return]

    def make_tokenizer(self, train: Callable[[], Iterable[Texts]]) -> Any:
        """Return the tokenizer of the model's folder, or one that is trained on the texts."""
        options = self.options
        if not options.from_scratch:
            return set_pad_token(load_tokenizer(options.model, options.model_folder()))
        texts = (text for text in chain.from_iterable(train()) if isinstance(text, str))
        return _train_tokenizer(texts, options.tokenizer.vocab_size)

    def encode(
        self, tokenizer: Any, info: TokenizerInfo, values: Sequence[Texts], refuse: Refuse
    ) -> Encoded:
        """Return the tokens of each text or pair, cut to ``max_seq_len``, and the numbers."""
        names = [key.removeprefix("columns.") for key in self.columns]
        by_name = dict(zip(names, zip(*values, strict=True), strict=True))
        texts = [list(by_name[name]) for name in names if name not in self.numbers]
        length = self.options.max_seq_len
        whole = tokenizer(*texts, verbose=False)["input_ids"]
        cut = tokenizer(*texts, truncation=True, max_length=length, verbose=False)["input_ids"]
        rows_cut = sum(len(tokens) > length for tokens in whole)
        columns: dict[str, Sequence[Any]] = {name: by_name[name] for name in self.numbers}
        return Encoded.from_columns({"tokens": cut} | columns, rows_cut=rows_cut)

    def collate(self, rows: Rows, batch: BatchInfo, info: TokenizerInfo) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask``, int64 ``(n, longest)``, and a tensor
        ``(n,)`` for each column with one number per row.
        """
        import torch

        tokens, mask = rows.padded("tokens", info.pad)
        arrays = {"input_ids": tokens.astype(np.int64), "attention_mask": mask.astype(np.int64)}
        for name in rows.names:
            if name != "tokens" and not rows.is_jagged(name):
                arrays[name] = np.array(rows[name])
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a tokenizer that keeps every character. Its end token pads, and parts pairs."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    from distcore_tasks.shared.vocabulary import train_byte_level

    trained = train_byte_level(texts, vocab_size, [END])
    trained.post_processor = processors.TemplateProcessing(
        single="$A", pair=f"$A {END} $B", special_tokens=[(END, trained.token_to_id(END))]
    )
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=trained, eos_token=END, pad_token=END)


def _number_problem(value: object, name: str) -> str | None:
    """Return the problem of a value that is no number. In a CSV file a number is a text."""
    is_text_of_number = isinstance(value, str) and _is_finite(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_text_of_number or (is_number and _is_finite(value)):
        return None
    return f"{name} is {describe_value(value)}, expected a number"


def _is_finite(value: object) -> bool:
    try:
        return math.isfinite(float(str(value)))
    except ValueError:
        return False
