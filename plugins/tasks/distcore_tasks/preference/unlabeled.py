"""Preferences to judge by a trained model, in chunks of a file."""

from __future__ import annotations

from distcore import FileRows
from distcore_data import row_error
from distcore_tasks.preference.dataset import PreferenceDataset
from distcore_tasks.preference.encode import encode
from distcore_tasks.preference.options import PairOptions
from distcore_tasks.preference.rows import schema_of_texts
from distcore_tasks.shared.source_rows import checked
from distcore_tasks.shared.tokenized import TokenizedDatasets


def unlabeled_preferences(
    rows: FileRows, options: PairOptions, data: TokenizedDatasets
) -> PreferenceDataset:
    """Return the dataset of ``rows``. Raises DataError with file and row for an invalid one."""
    name = f"data file {rows.file}"

    def refuse(place: int, problem: str) -> None:
        raise row_error(name, rows.start + place, problem)

    records = checked(name, rows.records, schema_of_texts(options.columns), rows.start)
    texts, _ = encode(records, refuse, data.loaded_tokenizer, options.max_seq_len)
    return PreferenceDataset(texts=texts, pad=data.pad, content="")
