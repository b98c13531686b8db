"""Datasets of tokens, with the tokenizer that made them, for models that write text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from distcore import Dataset, Datasets
from distcore_tasks.shared.pretrained import load_tokenizer, pad_token, tokenizer_files

GENERATED = 64
"""Tokens that a model writes at most for a row that says no answer, unless ``max_new_tokens`` says otherwise."""


@dataclass(frozen=True, kw_only=True)
class TokenizedDatasets(Datasets):
    """Tokenized rows, and the tokenizer that made the tokens."""

    vocab_size: int
    """Tokens in the tokenizer's vocabulary."""
    pad: int
    """Token that pads."""
    end: int | None
    """Token that ends an answer."""
    tokenizer: Path
    """Folder that ``AutoTokenizer`` reads."""

    @cached_property
    def loaded_tokenizer(self) -> Any:
        """The tokenizer itself; loading it takes a while."""
        return load_tokenizer(str(self.tokenizer), self.tokenizer)

    def save_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer's files into ``folder``, which is made where it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in tokenizer_files(self.tokenizer):
            shutil.copy(file, folder)


D = TypeVar("D", bound=TokenizedDatasets)


def tokenized(data: Datasets) -> TokenizedDatasets:
    """Return ``data`` as what ``prepare`` returned; raises TypeError if it is anything else."""
    if not isinstance(data, TokenizedDatasets):
        raise TypeError(f"expected the datasets of prepare(), found {type(data).__name__}")
    return data


def tokens_of(tokenizer: Any) -> dict[str, Any]:
    """Return what ``TokenizedDatasets`` says of its tokenizer, as JSON values."""
    return {"vocab_size": len(tokenizer), "pad": pad_token(tokenizer), "end": tokenizer.eos_token_id}


def count_tokens(tokenizer: Any) -> int:
    """Return the number behind the largest token; there may be gaps below, so it can be more than ``vocab_size``."""
    return int(max(tokenizer.get_vocab().values())) + 1


def with_rows(kind: type[D], sets: Mapping[str, Dataset], tokenizer: Path, **others: Any) -> D:
    """Return datasets by name as a whole: without a ``test`` the evaluation rows serve as test."""
    return kind(
        train=sets["train"],
        evaluation=sets["evaluation"],
        test=sets.get("test", sets["evaluation"]),
        tokenizer=tokenizer,
        **others,
    )


def without_rows(
    kind: type[D],
    folder: Path,
    empty: Callable[[int], Dataset],
    load: Callable[[str, Path], Any] = load_tokenizer,
    **others: Any,
) -> D | None:
    """Return datasets with the tokenizer in ``folder`` but no rows: enough to build a model and to predict with it.

    ``empty`` returns a dataset without rows for a padding token. ``None`` if ``folder`` has no tokenizer.
    """
    if not (folder / "tokenizer_config.json").is_file():
        return None
    tokens = tokens_of(load(str(folder), folder))
    rows = empty(tokens["pad"])
    return with_rows(kind, {"train": rows, "evaluation": rows}, folder, **tokens, **others)
