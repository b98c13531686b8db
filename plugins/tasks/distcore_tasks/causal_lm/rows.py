"""Rows of a language model: blocks of joined documents, or prompts and conversations with answers.

A document of a stream that is trained on is a row of its own, of one window or several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from distcore import Column, DataError
from distcore_data import Record
from distcore_tasks.causal_lm.conversations import ChatTemplate
from distcore_tasks.causal_lm.embedded import EMBEDDED, FORMS, MADE_FROM
from distcore_tasks.causal_lm.encode import check_tokenizer, encode
from distcore_tasks.causal_lm.forms import (
    columns_of,
    form_of,
    row_problem,
    row_value,
    texts_of,
    unread_columns,
    unread_keys,
)
from distcore_tasks.causal_lm.options import CausalOptions, Form
from distcore_tasks.causal_lm.shapes import PUBLISHED
from distcore_tasks.causal_lm.windows import COUNTED, completion, cut, left_padded, prompt_size
from distcore_tasks.rows.blocks import StreamedBlocks
from distcore_tasks.rows.dataset import RowDataset
from distcore_tasks.rows.pipeline import (
    BatchInfo,
    Encoded,
    Facts,
    NamedValues,
    PreparedRows,
    Refuse,
    RowPipeline,
    TokenizerInfo,
)
from distcore_tasks.rows.table import CachedTable, Rows, Table
from distcore_tasks.shared.arrays import array_blocks, digest_arrays
from distcore_tasks.shared.cache import cut_warning, side_warning
from distcore_tasks.shared.jagged import IGNORED, Jagged, flat_of
from distcore_tasks.shared.pretrained import load_tokenizer, set_pad_token
from distcore_tasks.shared.sources import naming, rows_name, source_file
from distcore_tasks.shared.token_metrics import count_each, log_frequencies, unigram_perplexity
from distcore_tasks.shared.tokenized import count_tokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CausalRows(RowPipeline[Any]):
    """Tokens of which some are targets. A value is a text, a pair of texts, or a conversation."""

    kind: ClassVar = "sequences"
    version: ClassVar = 8
    embedded: ClassVar = EMBEDDED
    made_from: ClassVar = MADE_FROM

    options: CausalOptions
    """Options of the task."""
    is_packed: bool = False
    """True if short rows of a batch share a sequence."""

    # What the sources say

    def resolved(self) -> CausalRows:
        """Return the same rows with their form. Raises DataError for sources of two forms."""
        options = self.options
        form = self._form_of(options.data, options.form)
        for name, source in options.held_out.items():
            # A held-out stream is read in the form of the training rows.
            given = form if options.stream else options.form
            with naming(name):
                other = self._form_of(source, given)
            if other != form:
                forms = f"has {other}, but {rows_name(options.data, options)} has {form}"
                where = f"{rows_name(source, options)}, for {name}"
                raise DataError(f"{where}: {forms}: use one form for all")
        return self.knowing({"form": form})

    def _form_of(self, source: str, given: Form | Literal["auto"]) -> Form:
        """Return the form of a source; ``given`` is that of files, or auto."""
        if source in FORMS:
            return FORMS[source]
        file = source_file(source, self.embedded, self.options.filter)
        return form_of(file, replace(self.options, form=given))

    @property
    def form(self) -> Form | None:
        """Form of all rows; ``None`` before their sources are looked at."""
        return self.learned.get("form")

    def learn(self, name: str, values: Iterable[Any]) -> Mapping[str, Any]:
        """Return the form."""
        return self.learned

    def notes(self, tokenizer: Any, sources: Sequence[NamedValues[Any]]) -> Mapping[str, Any]:
        """Return with which tokens conversations end an answer, and warnings about them."""
        if self.form != "messages":
            return {}
        template = ChatTemplate(tokenizer)
        read = sources[:1] if self.options.stream else sources
        unread = dict.fromkeys(unread_keys(read, tokenizer))
        warnings = [*template.warnings({"messages": []}), *unread]
        return {"answer_ends": template.ends(), "template_warnings": warnings}

    # What is read and encoded

    @property
    def unit(self) -> str:
        """What a source has."""
        return "documents" if self.form == "documents" else "conversations"

    @property
    def refuses(self) -> bool:
        """True for rows with answers, which may be cut off."""
        return self.form != "documents"

    @property
    def block(self) -> int | None:
        """Most tokens that a block of documents reads."""
        return self.options.max_seq_len if self.form == "documents" else None

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns of the form; of all forms before the form is known."""
        if self.form is None:
            return {f"columns.{key}": name for key, name in asdict(self.options.columns).items()}
        return columns_of(self.form, self.options.columns)

    @property
    def settings(self) -> Sequence[object]:
        """The options that change tokens, and the given form."""
        options = self.options
        documents = [options.split_documents, options.end_documents]
        return [options.form, options.max_seq_len, *documents]

    @property
    def streamed_settings(self) -> Sequence[object]:
        """The form that was found, and the options that change tokens."""
        return [self._known_form, self.options.max_seq_len, self.options.end_documents]

    @property
    def _known_form(self) -> Form:
        assert self.form is not None  # sources are looked at before rows are read
        return self.form

    def check(self, record: Record) -> str | None:
        """Return what is wrong with a record."""
        return row_problem(self._known_form, record)

    def value(self, record: Record) -> Any:
        """Return a text, a pair of texts, or a conversation."""
        return row_value(self._known_form, record)

    def size(self, value: Any) -> int:
        """Return the number of characters of all texts."""
        return sum(map(len, texts_of([value])))

    def make_tokenizer(self, train: Callable[[], Iterable[Any]]) -> Any:
        """Return the model's tokenizer; of a built-in model one that is trained on values.

        Raises ModelError for one that cannot write conversations.
        """
        options = self.options
        if options.from_scratch:
            from distcore_tasks.causal_lm.vocabulary import train_tokenizer

            tokenizer = train_tokenizer(texts_of(train()), options.tokenizer.vocab_size)
        else:
            tokenizer = set_pad_token(load_tokenizer(options.model, options.model_folder()))
        check_tokenizer(rows_name(options.data, options), self._known_form, tokenizer)
        return tokenizer

    def describe_tokenizer(self, tokenizer: Any) -> Mapping[str, np.ndarray]:
        """Return the size of the vocabulary, with gaps in its numbers."""
        return {"size": np.array(count_tokens(tokenizer))}

    def encode(
        self, tokenizer: Any, info: TokenizerInfo, values: Sequence[Any], refuse: Refuse
    ) -> Encoded:
        """Return the rows, as ``sequence_table`` does, and the number of those that are cut."""
        encoded = encode(self._known_form, self.options, tokenizer, values, refuse)
        tokens, flags, are_cut = zip(*encoded, strict=True)
        return Encoded(sequence_table(tokens, flags), counts={"rows_cut": sum(are_cut)})

    def block_numbers(self, blocks: CachedTable) -> Mapping[str, np.ndarray]:
        """Return what each block reads, and its targets."""
        return _numbers(blocks.jagged("flags"))

    def content(self, table: CachedTable) -> str:
        """Return the digest of tokens, flags, and of where each row begins and what it reads."""
        tokens = table.jagged("tokens")
        values, flags = tokens.values, table.jagged("flags").values
        return digest_arrays(values, flags, tokens.starts, tokens.lengths - 1)

    # Batches

    @property
    def pads(self) -> bool:
        """True unless short rows share a sequence."""
        return not self.is_packed

    def length(self, rows: Rows) -> np.ndarray:
        """Return the tokens that each row reads."""
        return rows["reads"]

    def items(self, rows: Rows, info: TokenizerInfo) -> np.ndarray:
        """Return the number of targets of each row."""
        return rows["targets"]

    def length_column(self, table: Table) -> Column:
        """Return the tokens that each row reads; blocks of a stream are not made for that."""
        if isinstance(table, StreamedBlocks):
            return table.lengths
        return super().length_column(table)

    def item_column(self, table: Table, info: TokenizerInfo) -> Column:
        """Return the targets of each row; a block of a stream has as many as it reads tokens."""
        if isinstance(table, StreamedBlocks):
            return table.lengths
        return super().item_column(table, info)

    def collate(self, rows: Rows, batch: BatchInfo, info: TokenizerInfo) -> dict[str, Tensor]:
        """Return int64 tensors, as ``Windows.tensors`` does, with ``lengths``, ``(n,)``.

        With generation, rows to evaluate have ``prompt_ids`` and ``prompt_mask``, as
        ``left_padded`` returns them; the mask of a row without a prompt is all zeros. If targets
        are told, ``targets``, ``(targets,)``, has their positions in the flattened ``labels``.
        """
        import torch

        tokens, flags = rows.spans("tokens"), rows.spans("flags")
        windows = cut(tokens, flags, self.options.max_seq_len)
        tensors = windows.tensors(info.pad, packed=self.is_packed)
        tensors["lengths"] = torch.from_numpy(self.length(rows))
        if batch.tells_targets:
            is_target = tensors["labels"].flatten() != IGNORED
            tensors["targets"] = is_target.nonzero()[:, 0]
        if batch.is_training or not self.options.max_new_tokens:
            return tensors
        prompts = []
        for row, number in enumerate(batch.numbers.tolist()):
            is_wanted = self.options.samples is None or number < self.options.samples
            size = prompt_size(flags.row(row)) if is_wanted else 0
            prompts.append(tokens.row(row)[:size])
        return tensors | left_padded(prompts, info.pad)

    # Facts

    def facts(
        self, name: str, table: CachedTable, train: CachedTable | None, info: TokenizerInfo
    ) -> Facts:
        """Return the number of tokens and targets and, with stored training rows, a baseline."""
        rows = table.all()
        facts: Facts = {
            "tokens": int(self.length(rows).sum()),
            "targets": int(self.items(rows, info).sum()),
        }
        if train is None:  # nobody knows how often a token is there
            return facts
        common = log_frequencies(counts=_count_tokens(train, info))
        counts = _count_tokens(table, info)
        return facts | {"unigram_perplexity": unigram_perplexity(counts=counts, common=common)}

    def facts_of_blocks(self, entries: int) -> Facts:
        """Return the number of tokens, each of which is followed by a target."""
        return {"tokens": entries, "targets": entries}

    def facts_of_data(self) -> Facts:
        """Return form and packing, and what the rows of documents are."""
        options = self.options
        facts: Facts = {"form": self.form, "packing": self.is_packed}
        if self.form == "documents":
            window = f"a window of at most {options.max_seq_len} tokens"
            kind = "a document" if options.stream else window
            facts["source"] = f"{options.data}, each {kind}"
        return facts

    def dataset_fields(self) -> Mapping[str, Any]:
        """Return the tokens with which conversations end an answer."""
        return {"answer_ends": tuple(self.learned.get("answer_ends", ()))}

    def warnings(
        self, sets: Mapping[str, PreparedRows], facts: Mapping[str, Facts]
    ) -> Iterator[str]:
        """Yield lines about what is not read or is cut, and about a model without weights."""
        options = self.options
        yield from unread_columns(options, self._known_form, self.embedded)
        yield from self.learned.get("template_warnings", ())
        yield from cut_warning(facts, options.max_seq_len)
        yield from side_warning(facts, options)
        if options.model in PUBLISHED:
            where = f"--model openai-community/{options.model} takes the published ones"
            yield f"model {options.model}: built in, begins with random weights; {where}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences(RowDataset):
    """Rows of a language model."""

    pipeline: CausalRows
    """What the task says of the rows."""

    def padded(self) -> Sequences | None:
        """Return the same rows with padding; ``None`` if only packing isolates documents."""
        if self.pipeline.options.split_documents:
            return None
        pipeline = replace(self.pipeline, is_packed=False)
        return self._with_columns(replace(self, pipeline=pipeline, tells_targets=False))

    def with_targets(self) -> Sequences:
        """Return the same rows, with target positions in the batches of packed ones.

        Returns itself if every position is a target, if only packing can isolate documents, and
        for rows that are streamed.
        """
        pipeline = self.pipeline
        if not pipeline.is_packed or pipeline.options.split_documents or self.is_streamed:
            return self
        targets, read = (int(np.asarray(column).sum()) for column in (self.items, self.lengths))
        return self._with_columns(replace(self, tells_targets=True)) if targets < read else self

    def completion(self, index: int) -> np.ndarray:
        """Return the targets right after a row's prompt, int32 ``(tokens,)``."""
        rows = self.table.take(np.array([index]))
        return completion(rows.spans("tokens").row(0), rows.spans("flags").row(0))


def sequence_table(tokens: Sequence[np.ndarray], flags: Sequence[np.ndarray]) -> CachedTable:
    """Return rows of tokens, int32, with the flags of each, uint8, and numbers of each row.

    ``reads``: tokens that it reads, all but its last, and at least one. ``targets``: those that
    are predicted. Both are in files, which ranks share.
    """
    sizes = np.fromiter(map(len, tokens), np.int64, len(tokens))
    all_tokens = flat_of(np.concatenate([np.empty(0, np.int32), *tokens]), sizes)
    all_flags = flat_of(np.concatenate([np.empty(0, np.uint8), *flags]), sizes)
    return CachedTable({"tokens": all_tokens, "flags": all_flags, **_numbers(all_flags)})


def _numbers(flags: Jagged) -> dict[str, np.ndarray]:
    """Return the numbers of rows of ``sequence_table``, int64 ``(rows,)``."""
    return {"reads": np.maximum(flags.lengths - 1, 1), "targets": _count_targets(flags)}


def _count_targets(flags: Jagged) -> np.ndarray:
    """Return the number of targets of rows that lie near each other, int64 ``(rows,)``.

    No token comes before the first one of a row to predict it from.
    """
    begin, end = int(flags.starts.min(initial=len(flags.values))), int(flags.ends.max(initial=0))
    is_counted = flags.values[begin:end] & COUNTED
    # Entry i is the number of targets among the first i tokens.
    targets_before = np.concatenate([[0], np.cumsum(is_counted, dtype=np.int64)])
    ends = flags.ends - begin
    first_targets = np.minimum(flags.starts - begin + 1, ends)
    counts: np.ndarray = targets_before[ends] - targets_before[first_targets]
    return counts


def _count_tokens(table: CachedTable, info: TokenizerInfo) -> np.ndarray:
    """Return how often each token is a target, int64."""
    tokens, flags = table.jagged("tokens").values, table.jagged("flags").values
    blocks = zip(array_blocks(tokens), array_blocks(flags), strict=True)
    targets = (some[(marks & COUNTED) > 0] for some, marks in blocks)
    return count_each(targets, int(info["size"]))
