"""Cache prepared datasets by a digest of everything that their content depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from distcore import DataError, RunConfig
from distcore_data import Filtered, IndexedRows, cached_folder, files_of, skipping
from distcore_tasks.shared.changed_files import Change, File, Files, find_change
from distcore_tasks.shared.mixtures import mixed_sources
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import cuts_at_begin, tokenizer_digest
from distcore_tasks.shared.sources import check_filter, say_embedded, source_digests, source_file
from distcore_tasks.shared.tokenized import tokens_of

ENTRY = "entry.json"
"""File with the facts of a cache entry."""
STREAMS = 2
"""Version of the files of streamed datasets."""
Build = Callable[[Path], tuple[Any, dict[str, Any]]]
"""Fill a new cache entry, one folder per dataset; return the tokenizer and the entry's record."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A cache entry: one folder per dataset, the tokenizer's folder, and ``ENTRY``."""

    folder: Path
    """The entry."""
    record: dict[str, Any]
    """The record that ``build`` returned, with ``tokens``, the
    tokenizer's fields of ``TokenizedDatasets``.
    """
    files: Files = ()
    """The files of ``data``."""
    change: Change | None = None
    """The file of stored rows that has changed since the run began."""

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """Facts of each dataset for the report, by name."""
        facts: dict[str, dict[str, Any]] = self.record["facts"]
        return facts

    @property
    def tokens(self) -> dict[str, Any]:
        """``vocab_size``, ``pad`` and ``end`` of the tokenizer."""
        tokens: dict[str, Any] = self.record["tokens"]
        return tokens

    @property
    def bad_rows(self) -> list[str]:
        """A line for each row that was passed over."""
        lines: list[str] = self.record.get("bad_rows", [])
        return lines

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of ``TokenizedDatasets``, and the change of stored files."""
        return self.tokens | {
            "bad_rows": tuple(self.bad_rows),
            "files": self.files,
            "change": self.change,
        }

    @property
    def sources(self) -> list[int]:
        """The first training row of each source of a mixture, and the end of the last;
        empty without a mixture.
        """
        sources: list[int] = self.record.get("sources", [])
        return sources

    @property
    def sizes(self) -> list[float]:
        """The mean length of the rows of each source of a mixture, where rows are
        streamed and it counts.
        """
        sizes: list[float] = self.record.get("sizes", [])
        return sizes

    @property
    def streamed(self) -> list[str]:
        """Names of the datasets whose rows are read when their step comes; the entry
        says which these are.
        """
        streamed: list[str] = self.record.get("streamed", [])
        return streamed

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer."""
        return self.folder / "tokenizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedDatasets:
    """The prepared datasets of one task."""

    kind: str
    """Name of their folder in the cache."""
    version: int
    """Version of the files in an entry. Raise it when their layout or meaning changes."""
    embedded: Collection[str]
    """Names of the embedded datasets."""
    made_from: tuple[object, ...]
    """Everything that the rows of embedded datasets depend on, except for the Python version."""

    def entry(
        self,
        options: TaskOptions,
        config: RunConfig,
        settings: Sequence[object],
        vocab_size: int,
        build: Build,
    ) -> Entry:
        """Return the cache entry of these options; ``build`` fills a missing one.

        ``settings``: the options that rows and tokens depend on. ``vocab_size``: that of a built-in
        model. For an existing entry, files are only read for their digest, and neither parsed nor
        tokenized. Raises DataError, on a resume for a file of a stream that has changed.
        """
        check_filter(options)
        if options.data in self.embedded:
            say_embedded(options.data)
        files = partial(_files, options.data, self.embedded, options.stream)
        # A new run lists the files of stored rows when it saves them: the index of a file that was
        # just written is not kept, so a list made here would take another pass.
        listed = files() if options.stream or config.resume else ()
        change = find_change(listed, options, config)
        if change and options.stream:
            raise change.error
        key = self._key(options, config.seed, settings, vocab_size)
        folder = cached_folder(
            self.kind, key, lambda folder: _write(folder, build, options.skip_bad_rows)
        )
        return Entry(
            folder,
            json.loads((folder / ENTRY).read_text(encoding="utf-8")),
            listed or files,
            change,
        )

    def _key(
        self, options: TaskOptions, seed: int, settings: Sequence[object], vocab_size: int
    ) -> str:
        """Return a digest of everything that the content of an entry depends on."""
        facts = [
            self.version,
            source_digests(options, self.embedded, self.made_from),
            # the split depends on these
            None if options.eval_data else [seed, options.eval_fraction],
            list(settings),
            vocab_size if options.from_scratch else tokenizer_digest(options.model_folder()),
            # a new release may tokenize differently
            [version("tokenizers"), version("transformers")],
        ]
        if sources := mixed_sources(options):
            facts.append([len(files_of(Path(source).expanduser())) for source in sources])
        if options.stream:
            facts.append({"stream": STREAMS})
        if options.skip_bad_rows:
            facts.append({"skip_bad_rows": options.skip_bad_rows})
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def _files(data: str, embedded: Collection[str], stream: bool) -> list[File]:
    """Return the files of ``data``; none if those of stored rows cannot be read, which
    their reader says better.
    """
    if data in embedded:
        return []
    source = source_file(data, embedded)
    assert not isinstance(source, Filtered)  # no filter is given here
    with nullcontext() if stream else suppress(DataError):
        return IndexedRows(source, {}, whole=False).files()
    return []


def _write(folder: Path, build: Build, most_bad_rows: int) -> None:
    with skipping(most_bad_rows) as bad:
        tokenizer, record = build(folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    entry = json.dumps(
        {**record, "bad_rows": [*bad.problems], "tokens": tokens_of(tokenizer)}, ensure_ascii=False
    )
    (folder / ENTRY).write_text(entry, encoding="utf-8")


def total(facts: Mapping[str, Mapping[str, int]], name: str) -> int:
    """Return the sum of one fact over all datasets."""
    return sum(part[name] for part in facts.values())


def side_warning(facts: Mapping[str, Mapping[str, int]], options: TaskOptions) -> Iterator[str]:
    """Yield a line if rows were cut at their end, and the tokenizer's settings
    say at their begin.
    """
    if (
        total(facts, "rows_cut")
        and not options.from_scratch
        and cuts_at_begin(options.model_folder())
    ):
        yield (
            f"model {options.model}: truncation_side of tokenizer_config.json is not read: rows"
            " with answers are cut at their end; to keep the end, raise --max-seq-len, or cut the"
            " rows before"
        )


def cut_warning(
    facts: Mapping[str, Mapping[str, int]],
    length: int,
    rows: str = "rows",
    *,
    of: str | None = None,
    remedy: str = "--max-seq-len sets another length",
) -> Iterator[str]:
    """Yield a warning if some ``rows`` were cut to ``length`` tokens.

    ``of``: the fact with their total number.
    """
    if cut := total(facts, f"{rows}_cut"):
        yield (
            f"{cut} of {total(facts, of or rows)} {rows} have more than {length} tokens and are"
            f" cut; {remedy}"
        )
