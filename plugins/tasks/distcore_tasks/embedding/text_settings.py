"""The settings of texts in a folder of sentence-transformers: case, prompts, and
tokens that are pooled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distcore import ModelError
from distcore_tasks.embedding.folder_keys import (
    check_encoder_keys,
    check_model_keys,
    check_pooling_keys,
)
from distcore_tasks.shared.pretrained import one_line_errors

MODULES = "modules.json"
"""The file with the list of the parts of a model."""
PROMPTS = "config_sentence_transformers.json"
"""The file of prompts."""
TRANSFORMER = "sentence_*_config.json"
"""The file of the encoder's length and case; releases before 1 name it after the
kind of the encoder.
"""
NO_LIMIT = 10**6
"""From here on a tokenizer's ``model_max_length`` says that it has none."""


@dataclass(frozen=True)
class TextSettings:
    """The settings of one folder; these are those of a folder that says nothing."""

    lowers: bool = False
    """Whether texts become lower case, prompts, too."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts to put before others, by name."""
    default: str | None = None
    """Name of the prompt that is used where none is named."""
    pools_prompt: bool = True
    """Whether the tokens of a prompt take part in a mean."""
    length: int | None = None
    """Tokens of a text, behind which it is cut; ``None``: the folder is
    not one of sentence-transformers.
    """

    def prompt(self, given: str | None) -> str:
        """Return the text before others: of the name or the text ``given``, or the default.

        Raises ModelError for what looks like a name that is not there.
        """
        if given is None:
            return self.prompts[self.default] if self.default is not None else ""
        if given in self.prompts:
            return self.prompts[given]
        if self.prompts and given.isidentifier():
            raise ModelError(
                f"prompts: the model has no prompt {given!r}, but"
                f" {', '.join(map(repr, self.prompts))}; name one of these, or give a text, such as"
                " 'query: '"
            )
        return given


def read_text_settings(name: str, folder: Path, pooling: Path) -> TextSettings:
    """Return the settings in the folder of the model ``name``, whose module of
    pooling is in ``pooling``.

    Raises ModelError for those that this task does not have.
    """
    with one_line_errors(f"model {name}: its settings of sentence-transformers cannot be read"):
        files = [*sorted(folder.glob(TRANSFORMER)), folder / "sentence_bert_config.json"]
        encoder_file = files[0]
        encoder = _read(encoder_file)
        prompts = _read(folder / PROMPTS)
        pools = _read(pooling / "config.json")
        texts = {}
        for key, value in (prompts.get("prompts") or {}).items():
            texts[str(key)] = str(value)
        default = prompts.get("default_prompt_name")
        length = encoder.get("max_seq_length")
        is_of_sentence_transformers = bool(encoder) or (folder / MODULES).is_file()
        if length is None and is_of_sentence_transformers:
            length = _usual_length(folder)
    check_encoder_keys(name, encoder_file.name, encoder)
    check_pooling_keys(name, f"{pooling.name}/config.json", pools)
    check_model_keys(name, PROMPTS, prompts)
    if default is not None and default not in texts:
        raise ModelError(
            f"model {name}: {PROMPTS} has no prompt {default!r}, its default_prompt_name"
        )
    return TextSettings(
        lowers=bool(encoder.get("do_lower_case")),
        prompts=texts,
        default=default,
        pools_prompt=bool(pools.get("include_prompt", True)),
        length=length,
    )


def count_prompt_tokens(tokenizer: Any, prompt: str) -> int:
    """Return how many tokens of a text are those of its prompt, with what a
    tokenizer puts before it.
    """
    tokens = tokenizer(prompt)["input_ids"]
    # what a tokenizer puts behind a whole text
    ends = bool(tokens) and tokens[-1] in tokenizer.all_special_ids
    return len(tokens) - ends


def _usual_length(folder: Path) -> int | None:
    """Return the length that sentence-transformers takes where no file names one: what tokenizer
    and model both have.

    ``None`` where neither has a limit.
    """
    limits = (
        _read(folder / "tokenizer_config.json").get("model_max_length"),
        _read(folder / "config.json").get("max_position_embeddings"),
    )
    return min(
        (int(limit) for limit in limits if limit is not None and limit < NO_LIMIT), default=None
    )


def _read(file: Path) -> dict[str, Any]:
    """Return the object in a file of JSON; an empty one if there is no such file."""
    if not file.is_file():
        return {}
    tree: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return tree
