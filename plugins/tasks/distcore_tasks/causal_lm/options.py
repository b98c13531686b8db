"""What can be set of a causal language model: its model, its data files and its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from distcore import Direction, OnResume
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.shared.options import TaskOptions
from distcore_tasks.shared.token_metrics import METRICS

if TYPE_CHECKING:
    from distcore import RunConfig

Form = Literal["documents", "prompts", "messages"]
BOOL = BeforeValidator(lambda given: ("off", "on")[given] if isinstance(given, bool) else given)
"""YAML reads on and off as booleans."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns in data files; which of them a file needs depends on the form of its rows."""

    text: str = "text"
    """Column with a document."""
    prompt: str = "prompt"
    """Column with what the model is given."""
    completion: str = "completion"
    """Column with what it should answer."""
    messages: str = "messages"
    """Column with a conversation: a list of objects with ``role`` and ``content``."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer that a built-in model, which has no vocabulary, trains on the training rows."""

    vocab_size: Annotated[int, Field(ge=300)] = 2048
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class CausalOptions(TaskOptions):
    """The options of a causal language model."""

    flags: ClassVar = {
        "text-column": "columns.text",
        "prompt-column": "columns.prompt",
        "completion-column": "columns.completion",
        "messages-column": "columns.messages",
    }
    built_in: ClassVar = SHAPES
    metrics: ClassVar[dict[str, Direction]] = METRICS
    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "model": "other rows",  # its tokenizer makes the tokens
        "max_seq_len": "other rows",
        "packing": "free",
        "split_documents": "other rows",
        "max_new_tokens": "free",
        "samples": "free",
        "tokenizer": "free",  # the tokens that it makes are compared
    }

    model: str = "gpt2-tiny"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "stdlib-source"
    """Data file (.json .jsonl .csv .parquet), data set of datasets (FOLDER@SPLIT or hub name), or an embedded one."""
    form: Literal["auto", "documents", "prompts", "messages"] = "auto"
    """What a row is: a document, a prompt with its completion, or a list of messages; auto: what the columns say."""
    columns: Columns = Columns()
    """Names of the columns in data files."""
    tokenizer: Tokenizer = Tokenizer()
    """The vocabulary that a built-in model trains."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Tokens that the model reads at once: documents are cut into blocks of so many, longer conversations are cut."""
    packing: Annotated[Literal["auto", "on", "off"], BOOL] = "auto"
    """Whether short rows share a sequence; auto: as ``padding_free`` says, or where that is known to be exact."""
    split_documents: bool = False
    """Whether a document sees nothing of the one before it in its block; needs ``packing``."""
    max_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that evaluation lets the model generate, the likeliest each time, for each of ``samples``; 0: none."""
    samples: Annotated[int, Field(ge=1)] | None = None
    """Evaluation rows that the model goes on from, the first ones; null: every row."""

    def suggest(self, config: RunConfig) -> dict[str, object]:
        """Return the learning rate, and ``padding_free`` where ``packing`` is set: a packed row has no padding."""
        packing = {} if self.packing == "auto" else {"padding_free": self.packing}
        return super().suggest(config) | packing
