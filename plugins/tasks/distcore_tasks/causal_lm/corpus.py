"""Open the corpus of a run that streams it: check the options, count its rows, and make its dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from distcore import ConfigError
from distcore_data import Filtered, IndexedRows, Split, source_digest, source_name
from distcore_tasks.causal_lm.dataset import SequenceDataset
from distcore_tasks.causal_lm.embedded import EMBEDDED
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.streamed import Documents, StreamedDataset, sampled_texts
from distcore_tasks.shared.cache import Entry
from distcore_tasks.shared.mixtures import mixed_sources
from distcore_tasks.shared.pretrained import load_tokenizer, tokenizer_digest
from distcore_tasks.shared.sources import source_file


def check_stream(options: CausalOptions) -> None:
    """Raise ConfigError for options that need all rows before the first step."""
    why_not = {
        "data": options.data in EMBEDDED and f"{options.data} comes with distcore and is no file",
        "eval_data": options.eval_data is None and "a part of a stream cannot be kept for evaluation; give --eval-data",
        "form": options.form not in ("auto", "documents") and f"rows are documents, not {options.form}",
        "filter": options.filter.column and "which rows a filter keeps is known only after all are read",
        "skip_bad_rows": options.skip_bad_rows and "which rows are bad is known only after all are read",
        "split_documents": options.split_documents and "each document is a row of its own already; leave it out",
        "order.mix_by": options.order.mix_by == "tokens" and "tokens are known only after all rows are read",
    }
    for key, problem in why_not.items():
        if problem:
            raise ConfigError(f"task_options.stream = true, {key}: {problem}")


def corpus_rows(source: str, options: CausalOptions) -> IndexedRows:
    """Return the documents of a source by number; its index is made if it is missing. Raises DataError."""
    return IndexedRows(_source(source), {"columns.text": options.columns.text})


def corpus_facts(options: CausalOptions) -> tuple[dict[str, object], list[int]]:
    """Return the facts of the corpus for the report, and the first row of each source of a mixture, and the end."""
    rows = len(corpus_rows(options.data, options))
    counts = [len(corpus_rows(source, options)) for source in mixed_sources(options)]
    return {"documents": rows, "rows": rows, "rows_cut": 0}, [0, *accumulate(counts)] if counts else []


def corpus_sample(options: CausalOptions) -> list[str]:
    """Return some texts, for the vocabulary of a built-in model."""
    return sampled_texts(source_name(_source(options.data)), corpus_rows(options.data, options))


def open_corpus(
    entry: Entry, options: CausalOptions, layout: Callable[[SequenceDataset], SequenceDataset]
) -> StreamedDataset:
    """Return the corpus as a dataset, with the tokenizer of a cache entry."""
    source, tokenizer = _source(options.data), load_tokenizer(options.model, entry.tokenizer)
    end = tokenizer.eos_token_id if options.end_documents else None
    facts = [source_digest(source), tokenizer_digest(entry.tokenizer), options.max_seq_len, options.end_documents]
    name, rows = source_name(source), corpus_rows(options.data, options)
    return StreamedDataset(
        documents=Documents(name, rows, tokenizer, [] if end is None else [int(end)]),
        window=options.max_seq_len,
        pad=int(entry.tokens["pad"]),
        layout=layout,
        content=hashlib.sha256(repr(facts).encode()).hexdigest(),
    )


def _source(name: str) -> Path | Split:
    source = source_file(name, EMBEDDED)
    assert not isinstance(source, Filtered)  # check_stream refuses a filter
    return source
