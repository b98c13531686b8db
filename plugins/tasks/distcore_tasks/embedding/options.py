"""Options of text embeddings: model, pooling, data files, tokens and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import Field

from distcore import ConfigError, Direction, OnResume
from distcore_tasks.embedding.modules import Pooling, pooling_folder, saved_pooling
from distcore_tasks.embedding.text_settings import (
    TextSettings,
    count_prompt_tokens,
    read_text_settings,
)
from distcore_tasks.padding_free.options import PaddingFreeOptions
from distcore_tasks.shared.bert import SHAPES
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.pretrained import load_tokenizer

RETRIEVAL: dict[str, Direction] = {
    "accuracy_at_1": "max",
    "recall_at_10": "max",
    "mrr_at_10": "max",
    "ndcg_at_10": "max",
}
"""The metrics of retrieval."""


LENGTH = 128
"""Length of a text in tokens, where nobody says another."""
ROLES = ("anchor", "positive", "negative", "text")
"""What a text is in its row."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns in files with named columns."""

    anchor: str = "anchor"
    """Column of anchors, such as questions."""
    positive: str = "positive"
    """Column of the texts that belong to the anchors, such as answers."""
    negative: str | None = None
    """Column of a text for each row that does not belong to its anchor; default: rows have none."""
    text: str = "text"
    """Column of the texts that ``distcore predict`` embeds."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the texts of a training row, in order."""
        return (
            ("anchor", "positive") if self.negative is None else ("anchor", "positive", "negative")
        )


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a built-in model, which is trained on the training rows."""

    vocab_size: Annotated[int, Field(ge=64)] = 4000
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(PaddingFreeOptions, head="token classifier"):
    """Options of text embeddings."""

    flags: ClassVar = {
        "anchor-column": "columns.anchor",
        "positive-column": "columns.positive",
        "negative-column": "columns.negative",
        "text-column": "columns.text",
    }
    built_in: ClassVar = SHAPES
    pretrained_lr: ClassVar = 2e-5
    metrics: ClassVar[dict[str, Direction]] = {"loss": "min", **RETRIEVAL}
    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "columns": "free",
        "model": "other rows",  # its tokenizer makes the tokens
        "max_seq_len": "other rows",
        "tokenizer": "free",  # the tokens that it makes are compared
        "prompts": "other rows",
        "scale": "ask",
        "symmetric": "ask",
        "dims": "ask",
    }

    model: str = "bert-tiny"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "stdlib-search"
    """Data files (.json .jsonl .csv .parquet .arrow .tar), shards, FOLDER@SPLIT or hub
    name, or an embedded dataset.
    """
    columns: Columns = Columns()
    """Names of the columns in data files."""
    tokenizer: Tokenizer = Tokenizer()
    """The vocabulary of a built-in model."""
    max_seq_len: Annotated[int, Field(ge=4)] | None = None
    """Length of a text in tokens; longer texts are cut. Null: as a folder of
    sentence-transformers says, else 128.
    """
    pooling: Pooling | None = None
    """The mean of all tokens, or the first one; null: as a folder of sentence-transformers
    says, else the mean.
    """
    prompts: dict[str, str] = field(default_factory=dict)
    """A text before each anchor, positive, negative or text to embed, or its name in the model's
    folder; default: the folder's default prompt.
    """
    scale: Annotated[float, Field(gt=0)] = 20.0
    """Factor of the cosine similarities in the loss: 1 / temperature."""
    symmetric: bool = False
    """Also let each positive find its anchor, and take the mean of both losses."""
    dims: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Matryoshka sizes: the loss is the sum over embeddings cut to each;
    default: the whole embedding.
    """

    def __post_init__(self) -> None:
        """Raise ConfigError for a size that is named twice, and for a prompt of no column."""
        if len(set(self.dims)) != len(self.dims):
            raise ConfigError(f"dims = {list(self.dims)}: names a size twice; name each once")

        if other := sorted(self.prompts.keys() - set(ROLES)):
            raise ConfigError(f"prompts.{other[0]}: is not one of {', '.join(ROLES)}")

    @cached_property
    def text_settings(self) -> TextSettings:
        """What the model's folder does with texts.

        Raises ModelError for settings that this task does not have.
        """
        if self.from_scratch:
            return TextSettings()
        folder = self.model_folder()
        return read_text_settings(self.model, folder, pooling_folder(self.model, folder))

    @cached_property
    def length(self) -> int:
        """Length of a text in tokens. Raises ModelError as ``text_settings`` does."""
        return self.max_seq_len or self.text_settings.length or LENGTH

    @cached_property
    def prompt_texts(self) -> Mapping[str, str]:
        """What is put before the texts of each role.

        Raises ModelError for a name that the folder does not have.
        """
        return {role: self.text_settings.prompt(self.prompts.get(role)) for role in ROLES}

    def prepared(self, role: str, text: str) -> str:
        """Return the text that is tokenized for ``text``, which has this role in its row."""
        whole = self.prompt_texts[role] + text
        return whole.lower() if self.text_settings.lowers else whole

    @property
    def exported_settings(self) -> TextSettings:
        """What an export says of texts: the folder's prompts and those of the run; the default
        is that of ``text``.
        """
        settings = self.text_settings
        prompts = dict(settings.prompts)
        for role, text in self.prompts.items():
            # A prompt may be the name of one that the folder has.
            if text and text not in settings.prompts:
                prompts[role] = text
        default: str | None = settings.default
        prompt_of_text = self.prompts.get("text")
        if prompt_of_text in settings.prompts:
            default = prompt_of_text
        elif prompt_of_text is not None:
            # Empty: texts have no prompt.
            default = "text" if prompt_of_text else None
        return replace(settings, prompts=prompts, default=default)

    @cached_property
    def unpooled_tokens(self) -> Mapping[str, int]:
        """Tokens at the beginning of the texts of each role that take no part in their mean."""
        if self.text_settings.pools_prompt or not any(self.prompt_texts.values()):
            return dict.fromkeys(ROLES, 0)
        tokenizer = load_tokenizer(self.model, self.model_folder())
        return {
            role: count_prompt_tokens(tokenizer, self.prepared(role, "")) if prompt else 0
            for role, prompt in self.prompt_texts.items()
        }

    @cached_property
    def pools(self) -> Pooling:
        """The pooling in use.

        Raises ModelError for a folder with one that this task does not have.
        """
        if self.pooling is not None:
            return self.pooling
        return "mean" if self.from_scratch else saved_pooling(self.model, self.model_folder())
