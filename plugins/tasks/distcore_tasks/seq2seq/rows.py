"""Rows of sequence to sequence: pairs of texts, a source and a target."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from distcore_tasks.rows.pipeline import (
    BatchInfo,
    Encoded,
    Facts,
    PreparedRows,
    Refuse,
    TokenizerInfo,
)
from distcore_tasks.rows.table import CachedTable, Rows, TableColumn, joined_rows, text_column
from distcore_tasks.rows.texts import TextRows, Texts
from distcore_tasks.seq2seq.embedded import EMBEDDED, MADE_FROM
from distcore_tasks.seq2seq.languages import (
    languages_of,
    load_translator,
    say_languages,
    special_tokens_of,
)
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.shared.arrays import array_blocks
from distcore_tasks.shared.cache import cut_warning
from distcore_tasks.shared.jagged import IGNORED, Flat, flat_of
from distcore_tasks.shared.token_metrics import count_each, log_frequencies, unigram_perplexity
from distcore_tasks.shared.tokenize_rows import tokenize_chunk
from distcore_tasks.shared.tokenized import count_tokens

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("source", "target")
"""The texts of a row, and its columns of tokens; a column ``NAME_text`` has the text itself."""


@dataclass(frozen=True)
class PairRows(TextRows):
    """Sources with a prefix before each, and targets with an end token after each."""

    kind: ClassVar = "pairs"
    version: ClassVar = 4
    embedded: ClassVar = EMBEDDED
    made_from: ClassVar = MADE_FROM
    counts: ClassVar = ("sources_cut", "targets_cut")

    options: Seq2SeqOptions
    """Options of the task."""
    has_targets: bool = True
    """False for rows to predict."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Return the columns by config key; without targets that of sources alone."""
        if self.has_targets:
            return super().columns
        return {"columns.source": self.options.columns.source}

    @property
    def tokens(self) -> tuple[str, ...]:
        """All texts are tokens; rows to predict have no targets."""
        return NAMES if self.has_targets else NAMES[:1]

    @property
    def settings(self) -> Sequence[object]:
        """All options that change tokens."""
        options = self.options
        lengths = [options.max_seq_len, options.max_target_len]
        return [options.prefix, *lengths, options.source_lang, options.target_lang]

    def make_tokenizer(self, train: Callable[[], Iterable[Texts]]) -> Any:
        """Return the model's tokenizer; of a built-in model one that is trained on pairs."""
        if not self.options.from_scratch:
            return load_translator(self.options)
        from distcore_tasks.seq2seq.vocabulary import train_tokenizer

        return train_tokenizer(chain.from_iterable(train()), self.options.tokenizer.vocab_size)

    def describe_tokenizer(self, tokenizer: Any) -> Mapping[str, np.ndarray]:
        """Return what targets have around them, and which tokens are no part of a text."""
        if not self.has_targets:
            return {}
        around_source = special_tokens_of(tokenizer, targets=False)
        around_target = special_tokens_of(tokenizer, targets=True)
        roles = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
        special = roles | ({*around_source, *around_target} - {tokenizer.unk_token_id})
        prefix = self.options.prefix.rstrip()  # trailing spaces may join the next word
        before = tokenizer(prefix, add_special_tokens=False)["input_ids"] if prefix else []
        end = tokenizer.eos_token_id
        is_ended = end in around_target
        return {
            "special": np.array(sorted(special), np.int64),
            "prefix_tokens": np.array(len(before)),
            # Some tokenizers write the language of a target behind its end.
            "behind_end": np.array(len(around_target) - 1 - around_target.index(end))
            if is_ended
            else np.array(0),
            # M2M100's tokenizer leaves its languages out of its vocabulary.
            "size": np.array(max(count_tokens(tokenizer), *(n + 1 for n in around_target), 0)),
            "languages": np.array(languages_of(tokenizer), str),
        }

    def encode(
        self, tokenizer: Any, info: TokenizerInfo, values: Sequence[Texts], refuse: Refuse
    ) -> Encoded:
        """Return the tokens of sources and targets, each cut to its length, and their texts.

        Refuses rows whose source or target has no token of its own left.
        """
        sources, *others = zip(*values, strict=True)
        with_prefix = [self.options.prefix + text for text in sources]
        read = tokenize_chunk(tokenizer, with_prefix, self.options.max_seq_len)
        source = flat_of(read.values, read.lengths)
        if not self.has_targets:
            return Encoded(CachedTable({"source": source}))
        [targets] = others
        length = self.options.max_target_len
        written = tokenize_chunk(tokenizer, list(targets), length, targets=True)
        # A tokenizer keeps the length of its last call, and would be saved with it.
        special_tokens_of(tokenizer, targets=True)
        target = ended_targets(
            flat_of(written.values, written.lengths),
            tokenizer.eos_token_id,
            length,
            int(info["behind_end"]),
        )
        self._refuse_empty("source", _own_tokens(source, info), int(info["prefix_tokens"]), refuse)
        self._refuse_empty("target", _own_tokens(target, info), 0, refuse)
        columns: dict[str, TableColumn] = {"source": source, "target": target}
        columns |= {"source_text": text_column(sources), "target_text": text_column(targets)}
        cut = {"sources_cut": read.cut, "targets_cut": written.cut}
        return Encoded(CachedTable(columns), counts=cut)

    def _refuse_empty(self, name: str, own: np.ndarray, before: int, refuse: Refuse) -> None:
        """Refuse rows without tokens of their own, of which each has ``own``.

        ``before``: tokens of the prefix.
        """
        setting, length = {
            "source": ("--max-seq-len", self.options.max_seq_len),
            "target": ("--set task_options.max_target_len=N", self.options.max_target_len),
        }[name]
        behind = f" behind the prefix, which has {before}" if before else ""
        for place in np.flatnonzero(own <= before).tolist():
            problem = f"the {name} is cut off entirely: no token of it is left{behind}"
            refuse(place, f"{problem}; raise {setting} (now {length})")

    def length(self, rows: Rows) -> np.ndarray:
        """Return the tokens of source and target together."""
        lengths: np.ndarray = rows.lengths("source") + rows.lengths("target")
        return lengths

    def approximate_length(self, value: Texts) -> int | None:
        """Return the characters of a source: rows of like length are batched."""
        return len(value[0])

    def items(self, rows: Rows, info: TokenizerInfo) -> np.ndarray:
        """Return the tokens of each target."""
        return rows.lengths("target")

    def collate(self, rows: Rows, batch: BatchInfo, info: TokenizerInfo) -> dict[str, Tensor]:
        """Return tensors, padded to the longest of the rows.

        ``input_ids`` and ``attention_mask`` are int64 ``(n, longest source)``; ``labels``, int64
        ``(n, longest target)``, are ``IGNORED`` after a target. Rows to evaluate have their texts:
        ``NAME_text`` has the bytes of all rows, concatenated, uint8, and ``NAME_bytes`` the number
        of bytes of each row, int64 ``(n,)``.
        """
        import torch

        source, mask = rows.padded("source", info.pad)
        tables = {"input_ids": source, "attention_mask": mask}
        if self.has_targets:
            tables["labels"], _ = rows.padded("target", IGNORED)
        tensors = {name: torch.from_numpy(table.astype(np.int64)) for name, table in tables.items()}
        if batch.is_training or not self.has_targets:
            return tensors
        for name in NAMES:
            text, mask = rows.padded(f"{name}_text", 0)
            tensors[f"{name}_text"] = torch.from_numpy(text[mask])
            tensors[f"{name}_bytes"] = torch.from_numpy(mask.sum(1))
        return tensors

    def facts(
        self, name: str, table: CachedTable, train: CachedTable | None, info: TokenizerInfo
    ) -> Facts:
        """Return the numbers of tokens and, with stored training rows, baselines of metrics."""
        target = table.jagged("target")
        facts: Facts = {
            "tokens": len(table.jagged("source").values),
            "targets": len(target.values),
        }
        if train is None:  # nobody knows what is common in training
            return facts
        common = log_frequencies(counts=_count_targets(train, info))
        counts = _count_targets(table, info)
        facts["unigram_perplexity"] = unigram_perplexity(counts=counts, common=common)
        is_commonest = _hash_targets(table) == _commonest(_hash_targets(train))
        facts["commonest_target"] = round(float(np.mean(is_commonest)), 4)
        return facts

    def warnings(
        self, sets: Mapping[str, PreparedRows], facts: Mapping[str, Facts]
    ) -> Iterator[str]:
        """Yield the languages that nobody chose, and lines about texts that are cut."""
        yield from say_languages(self.options, sets["train"].info["languages"].tolist())
        for name, length, setting in (
            ("sources", self.options.max_seq_len, "--max-seq-len"),
            ("targets", self.options.max_target_len, "--set task_options.max_target_len=N"),
        ):
            remedy = f"{setting} sets another length"
            yield from cut_warning(facts, length, name, of="rows", remedy=remedy)


def ended_targets(flat: Flat, end: int | None, length: int, behind: int = 0) -> Flat:
    """Let each row have one end token: some tokenizers do not write it, and some texts end with
    one of their own.

    ``behind``: the number of tokens of each row behind its end.
    """
    if end is None:
        return flat
    rows = []
    for start, stop in zip(flat.offsets, flat.offsets[1:], strict=False):
        row, rest = flat.values[start : stop - behind], flat.values[stop - behind : stop]
        if len(row) > 1 and row[-1] == row[-2] == end:
            row = row[:-1]
        if not len(row) or row[-1] != end:
            row = np.append(row[: length - 1 - behind], np.int32(end))
        rows.append(np.append(row, rest))
    return joined_rows(rows, flat)


def _own_tokens(flat: Flat, info: TokenizerInfo) -> np.ndarray:
    """Return the number of tokens of each row that are not special, int64, shape ``(rows,)``."""
    total = np.concatenate([[0], np.cumsum(~np.isin(flat.values, info["special"]))])
    own_tokens: np.ndarray = np.diff(total[flat.offsets])
    return own_tokens


def _count_targets(table: CachedTable, info: TokenizerInfo) -> np.ndarray:
    """Return how often each token is in a target, int64."""
    return count_each(array_blocks(table.jagged("target").values), int(info["size"]))


def _hash_targets(table: CachedTable) -> np.ndarray:
    """Return a hash of the target of each row, uint64 ``(rows,)``."""
    texts = table.jagged("target_text")
    rows = (texts.row(row) for row in range(len(table)))
    digests = (hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    numbers = (int.from_bytes(digest, "little") for digest in digests)
    return np.fromiter(numbers, np.uint64, len(table))


def _commonest(numbers: np.ndarray) -> int:
    """Return the most common number; of several, the first. It is the baseline that
    always writes one target.
    """
    distinct, first, counts = np.unique(numbers, return_index=True, return_counts=True)
    return int(distinct[np.lexsort((first, -counts))[0]])
