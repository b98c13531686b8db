"""Datasets of tokens with their tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from distcore import Dataset, Datasets
from distcore_tasks.shared.bad_rows import bad_rows_warnings, write_bad_rows
from distcore_tasks.shared.changed_files import Change, Files, write_files
from distcore_tasks.shared.options import EVALUATION
from distcore_tasks.shared.pretrained import load_tokenizer, pad_token, tokenizer_files
from distcore_tasks.shared.streams.datasets import streamed_rows

ANSWER_ENDS = "answer_ends.json"
"""File of a run folder that lists the tokens that end an answer, where a chat template has any."""
GENERATED = 64
"""Maximum number of tokens to generate for a row without an answer, if ``max_new_tokens`` is 0."""


@dataclass(frozen=True, kw_only=True)
class TokenizedDatasets(Datasets):
    """Tokenized rows with their tokenizer."""

    vocab_size: int
    """Tokens in the tokenizer's vocabulary."""
    pad: int
    """Padding token."""
    end: int | None
    """End token."""
    answer_ends: tuple[int, ...] = ()
    """Tokens with which a chat template ends an answer; empty without conversations."""
    tokenizer: Path
    """Folder of the tokenizer, for ``AutoTokenizer``."""
    tokenizer_names: tuple[str, ...] | None = None
    """Names of the tokenizer's files in its folder; ``None`` if the folder holds no others."""
    bad_rows: tuple[str, ...] = ()
    """A line for each row that was passed over."""
    files: Files = ()
    """The files of ``data``."""

    @cached_property
    def loaded_tokenizer(self) -> Any:
        """The tokenizer, which is loaded once."""
        return load_tokenizer(str(self.tokenizer), self.tokenizer)

    def save_files(self, folder: Path) -> None:
        """Copy the tokenizer's files to ``folder``, created if needed; list bad rows and
        the data's files there.
        """
        names = self.tokenizer_names
        if names is None:  # the cache's folder holds what the tokenizer saved, and nothing else
            names = tuple(
                file.relative_to(self.tokenizer).as_posix() for file in self.tokenizer.rglob("*")
            )
        for name in names:
            if (self.tokenizer / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.tokenizer / name, folder / name)
        folder.mkdir(parents=True, exist_ok=True)
        write_bad_rows(folder, self.bad_rows)
        # A reopened run is exported, and an export has them in its generation_config.json.
        is_reopened = self.tokenizer_names is not None
        if self.answer_ends and not is_reopened:
            (folder / ANSWER_ENDS).write_text(json.dumps(self.answer_ends), encoding="utf-8")
        write_files(folder, self.files, self.train)


D = TypeVar("D", bound=TokenizedDatasets)


def tokenized(data: Datasets) -> TokenizedDatasets:
    """Return ``data`` with the type that ``prepare`` returns.

    Raises TypeError for other datasets.
    """
    if not isinstance(data, TokenizedDatasets):
        raise TypeError(f"expected the datasets of prepare(), found {type(data).__name__}")
    return data


def tokens_of(tokenizer: Any) -> dict[str, Any]:
    """Return the tokenizer's fields of ``TokenizedDatasets``, as JSON values."""
    return {
        "vocab_size": len(tokenizer),
        "pad": pad_token(tokenizer),
        "end": tokenizer.eos_token_id,
    }


def count_tokens(tokenizer: Any) -> int:
    """Return the largest token number plus 1.

    Gaps in the numbers make it larger than ``vocab_size``.
    """
    return int(max(tokenizer.get_vocab().values())) + 1


def with_rows(
    kind: type[D],
    sets: Mapping[str, Dataset],
    tokenizer: Path,
    *,
    warnings: Iterable[str] = (),
    bad_rows: tuple[str, ...] = (),
    change: Change | None = None,
    **others: Any,
) -> D:
    """Return ``sets``, datasets by name, as a ``kind``, with a warning of bad rows.

    Raises DataError for training rows that differ with a file that has changed.
    """
    if change:
        change.check(sets["train"])
    warnings = (*warnings, *bad_rows_warnings(bad_rows), *fetching_warnings(sets))
    given = {"warnings": warnings, "bad_rows": bad_rows} | others
    return kind(**by_field(sets), tokenizer=tokenizer, **given)


def fetching_warnings(sets: Mapping[str, Dataset]) -> Iterator[str]:
    """Yield a warning for a dataset of whose files an evaluation fetches all, because the cache
    does not hold them.
    """
    for name, rows in sets.items():
        streamed = streamed_rows(rows)
        if name != "train" and streamed is not None and not streamed.have_room:
            what = (
                f"{name} rows are in files that the cache does not hold, so each evaluation"
                " fetches all"
            )
            yield f"{streamed.name}: {what}; raise DISTCORE_REMOTE_BYTES, or name a smaller file"


def by_field(sets: Mapping[str, Dataset]) -> dict[str, Any]:
    """Return datasets by name as the fields of ``Datasets``.

    Without ``test`` the evaluation rows serve as test rows.

    Of several evaluation sets these are the rows of the first.
    """
    several = {
        name.removeprefix(EVALUATION): rows
        for name, rows in sets.items()
        if name.startswith(EVALUATION)
    }
    evaluation = next(iter(several.values())) if several else sets["evaluation"]
    test = sets.get("test", evaluation)
    return {"train": sets["train"], "evaluation": evaluation, "test": test, "evaluations": several}


def empty_datasets(
    kind: type[D],
    folder: Path,
    empty: Callable[[int], Dataset],
    load: Callable[[str, Path], Any] = load_tokenizer,
    **others: Any,
) -> D | None:
    """Return datasets without rows, with the tokenizer in ``folder``; ``None`` if there is none.

    They suffice to build a model and to predict with it. ``empty`` returns a dataset without rows
    for a padding token.
    """
    if not (folder / "tokenizer_config.json").is_file():
        return None
    tokenizer = load(str(folder), folder)
    tokens = tokens_of(tokenizer)
    ends = folder / ANSWER_ENDS
    if ends.is_file():
        tokens["answer_ends"] = tuple(json.loads(ends.read_text(encoding="utf-8")))
    rows = empty(tokens["pad"])
    names = tokenizer_files(folder, tokenizer)
    return with_rows(
        kind, {"train": rows, "evaluation": rows}, folder, tokenizer_names=names, **tokens, **others
    )
