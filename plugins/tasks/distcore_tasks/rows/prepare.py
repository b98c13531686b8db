"""The datasets of a run with a pipeline, from the cache if it has them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from distcore import DataError
from distcore_data import row_error, source_digest
from distcore_tasks.rows.blocks import open_streamed_blocks
from distcore_tasks.rows.building import TOKENIZER_INFO, fill_entry
from distcore_tasks.rows.dataset import RowDataset, RowsToPredict, VaryingRows, row_dataset
from distcore_tasks.rows.encoding import Encoder, check_pipeline, naming_row, schema_of
from distcore_tasks.rows.labels import LABELS, labels_folder
from distcore_tasks.rows.lazy_table import LazyTable, NumberedSource, StreamedTable
from distcore_tasks.rows.pipeline import RowPipeline, TokenizerInfo
from distcore_tasks.rows.sources import chosen_file, open_chosen, read_from
from distcore_tasks.rows.table import Table, open_table
from distcore_tasks.rows.writing import Encode, table_of
from distcore_tasks.shared.cache import CachedDatasets, Entry
from distcore_tasks.shared.classification.coded import open_targets
from distcore_tasks.shared.jagged import read_content
from distcore_tasks.shared.pretrained import tokenizer_digest
from distcore_tasks.shared.row_order import in_order
from distcore_tasks.shared.source_rows import checked
from distcore_tasks.shared.sources import data_warnings, source_label
from distcore_tasks.shared.stored_arrays import Entries
from distcore_tasks.shared.streams.values import NumberedValues
from distcore_tasks.shared.tokenized import TokenizedDatasets, with_rows

if TYPE_CHECKING:
    from distcore import FileRows, RunConfig

D = TypeVar("D", bound=TokenizedDatasets)


def prepare_rows(
    pipeline: RowPipeline[Any],
    config: RunConfig,
    kind: type[D],
    *,
    dataset: type[RowDataset] | None = None,
    **fields: Any,
) -> D:
    """Return the datasets of a run as a ``kind`` with ``fields``, from the cache if it has them.

    ``dataset``: their class, if it is one of the task's own. The cache key is a digest of the
    files, the options that shape rows, the tokenizer, and its libraries' versions. Raises
    DataError, ModelError or ConfigError.
    """
    check_pipeline(pipeline, config.loader.workers)
    options = pipeline.options
    cached = CachedDatasets(
        kind=pipeline.kind,
        version=pipeline.version,
        embedded=pipeline.embedded,
        made_from=pipeline.made_from,
    )
    settings = [dict(pipeline.columns), *pipeline.settings, *pipeline.code]
    # A pretrained model has its own vocabulary.
    vocab_size = options.tokenizer.vocab_size if options.from_scratch else 0
    build = partial(fill_entry, pipeline=pipeline, seed=config.seed)
    entry = cached.entry(options, config, settings, vocab_size, build)
    pipeline = pipeline.knowing(entry.record.get("learned", {}))
    opened = _OpenedEntry(entry, pipeline, dataset)
    sets = {name: opened.dataset(name) for name in entry.facts}
    facts = {name: entry.facts[name] | pipeline.facts_of_run(rows) for name, rows in sets.items()}
    warnings = (*data_warnings(options), *pipeline.warnings(sets, facts))
    sets["train"] = in_order(sets["train"], options, config, entry.sources, entry.sizes)
    return with_rows(
        kind,
        sets,
        entry.tokenizer,
        facts={"data": options.data, **pipeline.facts_of_data(), **facts},
        warnings=warnings,
        **pipeline.dataset_fields(),
        **entry.fields,
        **fields,
    )


@dataclass(frozen=True)
class _OpenedEntry:
    """A cache entry with its datasets."""

    entry: Entry
    """The entry."""
    pipeline: RowPipeline[Any]
    """What the task says of its rows."""
    kind: type[RowDataset] | None
    """Class of the datasets; ``None``: that of all tasks."""

    @cached_property
    def info(self) -> TokenizerInfo:
        """What is known of the tokenizer."""
        with np.load(self.entry.folder / TOKENIZER_INFO, allow_pickle=False) as arrays:
            return TokenizerInfo(int(self.entry.tokens["pad"]), dict(arrays))

    def dataset(self, name: str) -> RowDataset:
        """Return a dataset, as it is kept."""
        is_training = name == "train"
        varying = VaryingRows if is_training and self.pipeline.varies else RowDataset
        kind = self.kind or varying
        table, content = self._streamed(name) if name in self.entry.streamed else self._stored(name)
        return kind(
            pipeline=self.pipeline,
            table=table,
            info=self.info,
            content=content,
            origin=partial(_OpenedEntry.origin, self, name),
            is_training=is_training,
            source=source_label(self.pipeline.options.sources[name], self.pipeline.options),
        )

    def origin(self, name: str) -> tuple[NumberedSource, Encode]:
        """Return the values of a dataset, and what encodes them."""
        options = self.pipeline.options
        file = chosen_file(self.entry.folder, name)
        values = open_chosen(options.sources[name], self.pipeline, file)
        tokenizer = self.pipeline.load_tokenizer(options.model, self.entry.tokenizer)
        return values, Encoder(self.pipeline, tokenizer, self.info)

    def _stored(self, name: str) -> tuple[Table, str]:
        """Return the rows of a dataset, and the digest of their tokens."""
        folder = self.entry.folder / name
        return open_table(folder), read_content(folder)

    def _streamed(self, name: str) -> tuple[Table, str]:
        """Return the rows of a dataset, and the digest of what they depend on."""
        values, encode = self.origin(name)
        assert isinstance(values, NumberedValues)
        settings = [*self.pipeline.streamed_settings]
        beside = dict[str, Entries]()
        if self.pipeline.label_kind:
            beside[LABELS], digest = open_targets(labels_folder(self.entry.folder, name))
            settings.append(digest)
        rows = StreamedTable(values, partial(table_of, encode), beside)
        table: Table = rows
        if self.pipeline.block is not None and name != "train":
            folder, numbers = self.entry.folder / name, self.pipeline.block_numbers
            table = open_streamed_blocks(rows, self.pipeline.block, folder, numbers)
        return table, self._digest(name, values, settings)

    def _digest(self, name: str, values: NumberedValues[Any], settings: Sequence[object]) -> str:
        """Return a digest of the source, of which rows are taken, and of what encodes them."""
        source = read_from(self.pipeline.options.sources[name], self.pipeline)
        assert source is not None
        bits = None if values.chosen is None else values.chosen.bits.data
        facts = [
            source_digest(source),
            None if bits is None else hashlib.sha256(bits).hexdigest(),
            tokenizer_digest(self.entry.tokenizer),
            *settings,
            *self.pipeline.code,
        ]
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def rows_to_predict(
    pipeline: RowPipeline[Any], rows: FileRows, data: TokenizedDatasets
) -> RowDataset:
    """Return the dataset of some rows of a file, in their order.

    Raises DataError with file and row for an invalid one.
    """
    name = f"data file {rows.file}"
    values = list(checked(name, rows.records, schema_of(pipeline), rows.start))
    tokenizer = data.loaded_tokenizer
    info = TokenizerInfo(data.pad, pipeline.describe_tokenizer(tokenizer))
    given = _GivenValues(name, rows.start, values)
    lengths = [pipeline.approximate_length(value) for value in values]
    encode = Encoder(pipeline, tokenizer, info)
    if None in lengths:
        with naming_row(given.problem):
            return row_dataset(pipeline, encode(values, given.refuse).table, info)
    return RowsToPredict(
        pipeline=pipeline,
        table=LazyTable(given, partial(table_of, encode)),
        info=info,
        approximate_lengths=np.array(lengths, np.int64),
        values=values,
    )


@dataclass(frozen=True, eq=False)
class _GivenValues:
    """Values of some rows of a file, which the core read."""

    name: str
    """Name of the file in error messages."""
    start: int
    """Number of the first of the rows, from 1."""
    values: Sequence[Any]
    """Their values."""

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.values)

    def at(self, places: Sequence[int]) -> Sequence[Any]:
        """Return the values at ``places``."""
        return [self.values[place] for place in places]

    def problem(self, place: int, what: str) -> DataError:
        """Return the error of a value."""
        return row_error(self.name, self.start + place, what)

    def refuse(self, place: int, what: str) -> None:
        """Raise the error of a value."""
        raise self.problem(place, what)
