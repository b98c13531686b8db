"""Fill a new cache entry: open sources, choose and split rows, encode them, write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distcore import DataError
from distcore_data import pass_over
from distcore_tasks.rows.blocks import write_streamed_blocks
from distcore_tasks.rows.columns import LazyColumn
from distcore_tasks.rows.encoding import EncodeError, Encoder, naming_row
from distcore_tasks.rows.labels import OpenedParts, labeled_parts, labels_folder
from distcore_tasks.rows.lazy_table import LazyTable
from distcore_tasks.rows.pipeline import Facts, RowPipeline, TokenizerInfo
from distcore_tasks.rows.sources import (
    SizedPass,
    Values,
    bounds_in_values,
    chosen_file,
    in_one_pass,
    open_source,
    read_from,
    save_chosen,
)
from distcore_tasks.rows.writing import DatasetWriter, Encode, table_of
from distcore_tasks.shared.classification.coded import save_targets
from distcore_tasks.shared.pretrained import check_vocabulary
from distcore_tasks.shared.sources import naming
from distcore_tasks.shared.splits import evaluation_rows, split_rows, without
from distcore_tasks.shared.stored_arrays import Entries
from distcore_tasks.shared.streams.datasets import mean_lengths
from distcore_tasks.shared.streams.held_out import is_large
from distcore_tasks.shared.streams.values import AT_ONCE, NumberedValues
from distcore_tasks.shared.tokenized import tokens_of

TOKENIZER_INFO = "tokenizer_info.npz"
"""File of an entry with the arrays of ``TokenizerInfo``."""
Streamed = dict[str, NumberedValues[Any]]
"""The datasets that are streamed, by name."""


def fill_entry(folder: Path, pipeline: RowPipeline[Any], seed: int) -> tuple[Any, dict[str, Any]]:
    """Fill the new entry ``folder``. Return the tokenizer and the entry's record."""
    return _Entry(folder, pipeline.resolved(), seed).fill()


@dataclass(frozen=True)
class _Entry:
    """A new cache entry."""

    folder: Path
    """Its folder, which is empty."""
    pipeline: RowPipeline[Any]
    """What the task says of its rows."""
    seed: int
    """Seed of the split."""

    def fill(self) -> tuple[Any, dict[str, Any]]:
        """Return the tokenizer and the entry's record."""
        pipeline = self.pipeline
        kind = pipeline.label_kind
        if kind is None:
            whole = self._open(pipeline.options.data)
            learned = pipeline.learn(whole.name, self._in_order(whole))
            knowing = replace(self, pipeline=pipeline.knowing(learned))
            return knowing._encode_parts(knowing._unlabeled_parts(whole))
        parts, learned = labeled_parts(pipeline, kind, self.seed)
        return replace(self, pipeline=pipeline.knowing(learned))._encode_parts(parts)

    def _encode_parts(self, opened: OpenedParts) -> tuple[Any, dict[str, Any]]:
        """Write the datasets. Return the tokenizer and the record."""
        pipeline, parts, targets = self.pipeline, opened.values, opened.targets
        tokenizer = pipeline.make_tokenizer(partial(self._training_values, parts["train"]))
        info = TokenizerInfo(tokens_of(tokenizer)["pad"], pipeline.describe_tokenizer(tokenizer))
        arrays: Any = info.arrays
        np.savez(self.folder / TOKENIZER_INFO, **arrays)
        encode = Encoder(pipeline, tokenizer, info)

        streamed = self._streamed(parts, encode)
        for name, values in streamed.items():
            save_chosen(values, chosen_file(self.folder, name))
            if name in targets:
                labels_folder(self.folder, name).mkdir()
                save_targets(labels_folder(self.folder, name), targets[name])
        bounds = bounds_in_values(streamed.get("train", parts["train"]), pipeline, self._open)
        stored = {name: values for name, values in parts.items() if name not in streamed}
        written = self._write(stored, targets, encode, bounds)
        tables = {name: writer.table for name, writer in written.items()}
        for name, writer in written.items():
            save_chosen(writer.accepted_values, chosen_file(self.folder, name))

        baseline = pipeline.baseline(tables["train"]) if "train" in tables else None
        facts = dict[str, Facts]()
        for name in parts:
            if name in streamed:
                facts[name] = self._facts_of_streamed(name, streamed[name], encode)
            else:
                facts[name] = self._facts_of_stored(name, written[name], baseline, info)
            if pipeline.label_kind:
                facts[name] |= pipeline.label_kind.facts(targets[name])
        if "train" in streamed:
            sizes = self._mean_lengths(streamed["train"], encode, bounds)
            mixture = {"sources": bounds, "sizes": sizes}
        else:
            mixture = {"sources": written["train"].row_bounds}
        notes = pipeline.notes(tokenizer, opened.sources)
        learned = {**pipeline.learned, **notes}
        return tokenizer, {
            "learned": learned,
            "facts": facts,
            "streamed": [*streamed],
            **mixture,
        }

    def _open(self, source: str) -> Values[Any]:
        return open_source(source, self.pipeline)

    def _in_order(self, values: Values[Any]) -> SizedPass[Any]:
        """Return values of ``data``, which are read from its first row on."""
        return SizedPass(values, read_from(self.pipeline.options.data, self.pipeline))

    def _unlabeled_parts(self, whole: Values[Any]) -> OpenedParts:
        """Return the datasets of rows without labels. Raises DataError.

        ``whole``: all values of ``data``.
        """
        options = self.pipeline.options
        held_out = dict[str, Values[Any]]()
        for name, source in options.held_out.items():
            with naming(name):
                held_out[name] = self._open(source)
        parts = {"train": whole} if options.eval_data else self._split(whole)
        return OpenedParts([whole, *held_out.values()], parts | held_out)

    def _split(self, whole: Values[Any]) -> dict[str, Values[Any]]:
        """Return training and evaluation values."""
        options, rows = self.pipeline.options, len(whole)
        if options.stream:
            evaluation = evaluation_rows(whole.name, rows, options.eval_fraction, self.seed)
        else:
            # Drawn however many rows there are: a checkpoint knows them by this order.
            _, evaluation = split_rows(whole.name, rows, options.eval_fraction, self.seed)
        return {
            "train": whole.only(without(rows, evaluation)),
            "evaluation": whole.only([evaluation]),
        }

    def _training_values(self, train: Values[Any]) -> Any:
        """Return what a tokenizer is trained on: a sample of a stream, or all values."""
        if self.pipeline.options.stream:
            return train.sample()
        return self._in_order(train)

    def _streamed(self, parts: Mapping[str, Values[Any]], encode: Encode) -> Streamed:
        """Return the datasets whose rows are encoded when their step comes."""
        streamed = Streamed()
        if not self.pipeline.options.stream:
            return streamed
        for name, values in parts.items():
            if not isinstance(values, NumberedValues):
                continue
            if name == "train" or is_large(values, partial(self._tokens_of, encode)):
                streamed[name] = values
        if self.pipeline.options.skip_bad_rows and self.pipeline.refuses:
            return {name: _encodable(values, encode) for name, values in streamed.items()}
        return streamed

    def _tokens_of(self, encode: Encode, values: Sequence[Any]) -> int:
        """Return the number of tokens of some values. Those that are refused count, too.

        What is wrong is named with its row when all are encoded.
        """
        try:
            rows = encode(values, lambda place, what: None).table.all()
        except EncodeError:
            return 0
        return int(self.pipeline.length(rows).sum())

    def _write(
        self,
        parts: Mapping[str, Values[Any]],
        targets: Mapping[str, Entries],
        encode: Encode,
        bounds: Sequence[int],
    ) -> dict[str, DatasetWriter]:
        """Encode and write datasets."""
        by_source = dict[str, dict[str, Values[Any]]]()
        for name, values in parts.items():
            by_source.setdefault(self.pipeline.options.sources[name], {})[name] = values
        writers = dict[str, DatasetWriter]()
        with ExitStack() as files:
            for name, values in parts.items():
                own_bounds = bounds if name == "train" else ()
                folder = self.folder / name
                writer = DatasetWriter(
                    folder, self.pipeline, values, encode, own_bounds, targets.get(name)
                )
                writers[name] = files.enter_context(writer)
            # An error in a small held-out source is known before the training rows are encoded.
            trained_on = self.pipeline.options.data
            for source in sorted(by_source, key=lambda source: source == trained_on):
                some = by_source[source]
                with naming(next(iter(some))):
                    for name, value in self._read(source, some):
                        writers[name].add(value)
                    for name in some:
                        writers[name].finish()
        return writers

    def _read(self, source: str, parts: Mapping[str, Values[Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the values of datasets of one source, each with its dataset's name."""
        if not self.pipeline.options.stream:
            yield from in_one_pass(parts, read_from(source, self.pipeline))
            return
        # The few evaluation rows of a large source: all others are not read.
        for name, values in parts.items():
            yield from ((name, value) for value in values)

    def _mean_lengths(
        self, train: NumberedValues[Any], encode: Encode, bounds: Sequence[int]
    ) -> list[float]:
        """Return the mean length of the rows of each source of a mixture, by some of them."""
        table = LazyTable(train, partial(table_of, encode))
        return mean_lengths(LazyColumn(table, self.pipeline.length), bounds)

    def _facts_of_streamed(self, name: str, values: NumberedValues[Any], encode: Encode) -> Facts:
        """Return the facts that are known before rows are encoded.

        Writes where the blocks of a dataset begin, if it has any.
        """
        pipeline, rows = self.pipeline, len(values)
        facts: Facts = {pipeline.unit: rows, "rows": rows, **dict.fromkeys(pipeline.counts, 0)}
        if pipeline.block is None or name == "train":
            return facts
        lengths = self._row_lengths(values, encode)
        blocks = write_streamed_blocks(lengths, pipeline.block, self.folder / name)
        return facts | {"rows": len(blocks), **pipeline.facts_of_blocks(blocks.entries)}

    def _row_lengths(self, values: NumberedValues[Any], encode: Encode) -> Iterator[int]:
        """Yield the tokens of each row of a dataset, all of which are encoded once."""
        [tokens, *_] = self.pipeline.tokens
        for start in range(0, len(values), AT_ONCE):
            places = range(start, min(start + AT_ONCE, len(values)))

            def refuse(place: int, what: str, places: range = places) -> None:
                raise values.problem(places[place], what)

            def problem(place: int, what: str, places: range = places) -> DataError:
                return values.problem(places[place], what)

            with naming_row(problem):
                table = encode(values.at(places), refuse).table
            yield from table.jagged(tokens).lengths.tolist()

    def _facts_of_stored(
        self, name: str, writer: DatasetWriter, baseline: Any, info: TokenizerInfo
    ) -> Facts:
        """Return the facts of a stored dataset. Raises DataError or ModelError."""
        pipeline, table = self.pipeline, writer.table
        options = pipeline.options
        if not options.from_scratch:
            tokens = (table.jagged(column).values for column in pipeline.tokens)
            largest = max(int(values.max(initial=0)) for values in tokens)
            check_vocabulary(options.model, options.model_folder(), largest)
        where = f"{writer.values.name}, for {name}"
        return {
            pipeline.unit: writer.accepted,
            "rows": len(table),
            **pipeline.facts(where, table, baseline, info),
            **{count: writer.counts[count] for count in pipeline.counts},
        }


def _encodable(values: NumberedValues[Any], encode: Encode) -> NumberedValues[Any]:
    """Return the values that ``encode`` does not refuse; the others are bad rows.

    Encodes all of them once.
    """
    refused = list[int]()
    for start in range(0, len(values), AT_ONCE):
        places = range(start, min(start + AT_ONCE, len(values)))

        def refuse(place: int, what: str, places: range = places) -> None:
            pass_over(values.problem(places[place], what))
            refused.append(places[place])

        def problem(place: int, what: str, places: range = places) -> DataError:
            return values.problem(places[place], what)

        with naming_row(problem):
            encode(values.at(places), refuse)
    return values.only(without(len(values), np.array(refused))) if refused else values
