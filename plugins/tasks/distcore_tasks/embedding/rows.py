"""Rows of text embeddings: an anchor, a text that belongs to it and, with a column of negatives,
one that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, ClassVar

import numpy as np

from distcore_tasks.embedding.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.embedding.known import HALF
from distcore_tasks.embedding.options import EmbeddingOptions
from distcore_tasks.rows.pipeline import (
    BatchInfo,
    Encoded,
    Facts,
    PreparedRows,
    Refuse,
    TokenizerInfo,
)
from distcore_tasks.rows.table import CachedTable, Rows
from distcore_tasks.rows.texts import TextRows, Texts
from distcore_tasks.shared.bert import hidden_size
from distcore_tasks.shared.cache import cut_warning
from distcore_tasks.shared.jagged import flat_of
from distcore_tasks.shared.lazy_rows import LazyValues
from distcore_tasks.shared.pretrained import check_vocabulary, load_tokenizer, set_pad_token
from distcore_tasks.shared.tokenize_rows import Tokens, tokenize_chunk


@dataclass(frozen=True)
class GroupRows(TextRows):
    """Texts that are tokenized each alone; those of rows to embed are one per row."""

    kind: ClassVar = "embeddings"
    version: ClassVar = 2
    embedded: ClassVar = EMBEDDED
    made_from: ClassVar = MADE_FROM
    counts: ClassVar = ("texts_cut",)
    refuses: ClassVar = False
    pads: ClassVar = True

    options: EmbeddingOptions
    """Options of the task."""
    is_predicted: bool = False
    """True for rows to embed, whose only text is ``text``."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The texts of a row by what they are in it."""
        return ("text",) if self.is_predicted else self.options.columns.names

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns of the texts by config key."""
        columns = self.options.columns
        return {f"columns.{role}": str(getattr(columns, role)) for role in self.tokens}

    @property
    def settings(self) -> Sequence[object]:
        """The options that change texts, and their length."""
        options = self.options
        prompts = {role: options.prompt_texts[role] for role in self.tokens}
        return [options.length, [prompts, options.text_settings.lowers]]

    @property
    def streamed_settings(self) -> Sequence[object]:
        """Also what the texts of a row are: the columns of a stream are not part of its digest."""
        return [self.tokens, *self.settings]

    def make_tokenizer(self, train: Callable[[], Iterable[Texts]]) -> Any:
        """Return the model's tokenizer; of a built-in model one that is trained on rows."""
        options = self.options
        if not options.from_scratch:
            return set_pad_token(load_tokenizer(options.model, options.model_folder()))
        from distcore_tasks.shared.wordpiece import as_transformers, train_wordpiece

        rows: Any = train()
        count = len(rows) * len(self.tokens)
        texts = LazyValues(lambda: chain.from_iterable(rows), count)
        return as_transformers(train_wordpiece(texts, options.tokenizer.vocab_size))

    def encode(
        self, tokenizer: Any, info: TokenizerInfo, values: Sequence[Texts], refuse: Refuse
    ) -> Encoded:
        """Return the tokens of each text of a row.

        Raises ModelError for a token outside the model's vocabulary.
        """
        texts_of_roles = zip(self.tokens, zip(*values, strict=True), strict=True)
        tokens = {role: self._tokenize(tokenizer, role, texts) for role, texts in texts_of_roles}
        table = CachedTable(
            {role: flat_of(some.values, some.lengths) for role, some in tokens.items()}
        )
        return Encoded(table, counts={"texts_cut": sum(some.cut for some in tokens.values())})

    def _tokenize(self, tokenizer: Any, role: str, texts: Sequence[str]) -> Tokens:
        """Return the tokens of texts that are the same in their rows."""
        options = self.options
        prepared = [options.prepared(role, text) for text in texts]
        tokens = tokenize_chunk(tokenizer, prepared, options.length)
        if not options.from_scratch and not self.is_predicted:
            largest = int(tokens.values.max(initial=0))
            check_vocabulary(options.model, options.model_folder(), largest)
        return tokens

    def length(self, rows: Rows) -> np.ndarray:
        """Return the tokens of all texts of each row."""
        lengths: np.ndarray = np.sum([rows.lengths(role) for role in self.tokens], axis=0)
        return lengths

    def collate(self, rows: Rows, batch: BatchInfo, info: TokenizerInfo) -> dict[str, Any]:
        """Return for each text of a row its name with the model's inputs.

        ``input_ids`` and ``attention_mask`` are int64 ``(n, longest)``. ``same`` has a digest of
        the tokens of each text in two halves, int64 ``(n, texts of a row, 2)``.
        """
        import torch

        tensors: dict[str, Any] = {}
        for role in self.tokens:
            tokens, mask = rows.padded(role, info.pad)
            inputs = {"input_ids": tokens, "attention_mask": mask}
            tensors[role] = {
                name: torch.from_numpy(table.astype(np.int64)) for name, table in inputs.items()
            }
        texts_of_rows = zip(*(rows.each(role) for role in self.tokens), strict=True)
        same = [[_halves(text) for text in texts] for texts in texts_of_rows]
        digests = np.array(same, np.int64).reshape(len(rows), -1, 2)
        return tensors | {"same": torch.from_numpy(digests)}

    def facts_of_run(self, rows: PreparedRows) -> Facts:
        """Return the number of texts."""
        return {"texts": len(rows) * len(self.tokens)}

    def warnings(
        self, sets: Mapping[str, PreparedRows], facts: Mapping[str, Facts]
    ) -> Iterator[str]:
        """Yield lines about texts that are cut, and about what nobody asked for."""
        options = self.options
        yield from cut_warning(facts, options.length, "texts")
        yield from _untrained_size(options)
        yield from _length(options)
        yield from _prompts(options)


def _untrained_size(options: EmbeddingOptions) -> Iterator[str]:
    """Yield a warning if the loss never sees whole embeddings, which
    evaluation and predictions use.
    """
    size = hidden_size(options)
    if options.dims and isinstance(size, int) and size not in options.dims:
        yield (
            f"dims = {list(options.dims)}: whole embeddings, of {size} numbers, are not trained as"
            f" such; add {size}"
        )


def _length(options: EmbeddingOptions) -> Iterator[str]:
    """Yield the length that the model's folder says, where no option says one."""
    if options.max_seq_len is None and options.text_settings.length is not None:
        yield (
            f"model {options.model}: texts have up to {options.length} tokens, as its folder of"
            " sentence-transformers says; --max-seq-len names another length"
        )


def _prompts(options: EmbeddingOptions) -> Iterator[str]:
    """Yield what the model's folder does with texts, and no option asked for."""
    settings = options.text_settings
    if settings.lowers:
        yield f"model {options.model}: texts become lower case (do_lower_case)"
    roles = [role for role in options.columns.names if role not in options.prompts]
    if settings.default is not None and roles:
        yield (
            f"model {options.model}: {settings.prompt(None)!r}, its default prompt, is put before"
            f" each {' and '.join(roles)}; prompts.{roles[0]} names another, or '' for none"
        )


def _halves(tokens: np.ndarray) -> tuple[int, int]:
    digest = blake2b(tokens.astype("<i4").tobytes(), digest_size=2 * HALF // 8).digest()
    return int.from_bytes(digest[: HALF // 8], "big"), int.from_bytes(digest[HALF // 8 :], "big")
