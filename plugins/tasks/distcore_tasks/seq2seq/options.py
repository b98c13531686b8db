"""Options of sequence to sequence: model, data files and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import Field, JsonValue

from distcore import Direction, OnResume
from distcore_tasks.padding_free.options import PaddingFreeOptions
from distcore_tasks.seq2seq.scores import NAMES
from distcore_tasks.seq2seq.shapes import SHAPES
from distcore_tasks.shared.chunked_cross_entropy.options import CrossEntropyOptions
from distcore_tasks.shared.token_metrics import METRICS


@dataclass(frozen=True)
class Columns:
    """Names of the columns in files with named columns."""

    source: str = "source"
    """Column of sources, the model's input."""
    target: str = "target"
    """Column of targets, the expected output."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a built-in model, which is trained on the training rows."""

    vocab_size: Annotated[int, Field(ge=300)] = 512
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Seq2SeqOptions(PaddingFreeOptions, CrossEntropyOptions, head="decoder"):
    """Options of sequence to sequence."""

    flags: ClassVar = {"source-column": "columns.source", "target-column": "columns.target"}
    built_in: ClassVar = SHAPES
    metrics: ClassVar[dict[str, Direction]] = METRICS
    built_in_type: ClassVar = "t5"
    on_resume: ClassVar[dict[str, OnResume]] = CrossEntropyOptions.on_resume | {
        "model": "other rows",  # its tokenizer makes the tokens
        "prefix": "other rows",
        "source_lang": "other rows",
        "target_lang": "other rows",
        "max_seq_len": "other rows",
        "max_target_len": "other rows",
        "label_smoothing": "ask",
        "max_new_tokens": "free",
        "generation": "free",
        "special_tokens": "free",
        "tokenizer": "free",  # the tokens that it makes are compared
    }

    model: str = "t5-tiny"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "stdlib-words"
    """Data files (.json .jsonl .csv .parquet .arrow .tar), shards, FOLDER@SPLIT or hub
    name, or an embedded dataset.
    """
    columns: Columns = Columns()
    """Names of the columns in data files."""
    prefix: str = ""
    """Text before every source, such as ``"summarize: "``, as in the model's pre-training."""
    source_lang: str = ""
    """Language of sources, a code of a multilingual tokenizer such as deu_Latn; default:
    what the folder says.
    """
    target_lang: str = ""
    """Language of targets, in which the model also generates; default: what the folder says."""
    tokenizer: Tokenizer = Tokenizer()
    """The vocabulary of a built-in model."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Length of a source in tokens, with its prefix; longer ones are cut."""
    max_target_len: Annotated[int, Field(ge=2)] = 64
    """Length of a target in tokens; longer ones are cut."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of a target's probability that the loss spreads evenly over all tokens."""
    max_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens that evaluation generates for each row, scored by exact match, BLEU
    and chrF; 0: none.
    """
    generation: dict[str, JsonValue] = field(default_factory=dict)
    """Settings that come before those of the model's generation_config.json; null
    takes a setting away.
    """
    special_tokens: bool = False
    """Whether generated texts show the special tokens that a model writes."""

    def __post_init__(self) -> None:
        """Declare the metrics of generated texts, if any are generated."""
        if self.max_new_tokens:
            written: dict[str, Direction] = dict.fromkeys(NAMES, "max")
            object.__setattr__(self, "metrics", self.metrics | written)  # only on this instance

    @cached_property
    def own_decoder_padding(self) -> int | None:
        """The padding token of a decoder whose inputs are made here; ``None`` if the model
        makes them of labels.

        transformers' FSMT leaves that to its caller.
        """
        config = self._config()
        return int(config.get("pad_token_id", 1)) if config["model_type"] == "fsmt" else None
