"""Options of tasks on pairs of answers, and of preference tuning, which adds the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distcore import Direction, OnResume
from distcore_tasks.causal_lm.options import CausalOptions
from distcore_tasks.causal_lm.shapes import SHAPES
from distcore_tasks.shared.answers import ConsultOnce
from distcore_tasks.shared.options import TaskOptions


@dataclass(frozen=True)
class Columns:
    """Names of the columns in files with named columns."""

    prompt: str = "prompt"
    """Column of prompts."""
    chosen: str = "chosen"
    """Column of the better answers."""
    rejected: str = "rejected"
    """Column of the worse answers."""


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a built-in model, which is trained on the training rows."""

    vocab_size: Annotated[int, Field(ge=300)] = 2048
    """Tokens in the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class PairOptions(TaskOptions):
    """Options of a task whose rows are prompts with a better and a worse answer."""

    flags: ClassVar = {
        "prompt-column": "columns.prompt",
        "chosen-column": "columns.chosen",
        "rejected-column": "columns.rejected",
    }
    built_in: ClassVar = {name: shape for name, shape in SHAPES.items() if not shape.experts}
    metrics: ClassVar[dict[str, Direction]] = {"loss": "min", "accuracy": "max", "margin": "max"}
    on_resume: ClassVar[dict[str, OnResume]] = TaskOptions.on_resume | {
        "model": "other rows",  # its tokenizer makes the tokens
        "max_seq_len": "other rows",
        "tokenizer": "free",  # the tokens that it makes are compared
    }

    model: str = "gpt2-tiny"
    """Built-in name, local Hugging Face folder, or hub name."""
    data: str = "stdlib-preferences"
    """Data files (.json .jsonl .csv .parquet .arrow .tar), shards, FOLDER@SPLIT or hub
    name, or an embedded dataset.
    """
    columns: Columns = Columns()
    """Names of the columns in data files."""
    tokenizer: Tokenizer = Tokenizer()
    """The vocabulary of a built-in model."""
    max_seq_len: Annotated[int, Field(ge=4)] = 128
    """Tokens of a prompt with its answer; longer ones are cut."""

    @property
    def mismatched(self) -> bool:
        """True if batches also have each prompt with the answer of another row."""
        return False

    def as_causal(self, model: str | None = None) -> CausalOptions:
        """Return the options of the same language model, or of another ``model``."""
        return CausalOptions(
            model=model or self.model, max_seq_len=self.max_seq_len, dropout=self.dropout
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions(ConsultOnce, PairOptions):
    """Options of preference tuning."""

    pretrained_lr: ClassVar[float] = 1e-6
    on_resume: ClassVar[dict[str, OnResume]] = PairOptions.on_resume | {
        "beta": "ask",
        "label_smoothing": "ask",
        "consult_once": "ask",
        "reference": "free",  # its weights are compared
    }

    dropout: Annotated[float, Field(ge=0, lt=1)] | None = 0.0
    """Probability of dropout; null: the model's own. With it, a model would differ from
    its reference at once.
    """
    loss: Literal["dpo", "ipo", "hinge", "kto"] = "dpo"
    """The loss of a pair; that of kto is over the global batch."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the model is kept near its reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a preference is the wrong way round, for dpo."""
    reference: str | None = None
    """Folder or hub name of the reference model; null: the trained model as it began."""

    @property
    def mismatched(self) -> bool:
        """True for kto, which reads the likelihood of such answers."""
        return self.loss == "kto"

    @property
    def path_options(self) -> tuple[str, ...]:
        """The options that name a file or a folder."""
        return (*super().path_options, *(("reference",) if self.reference is not None else ()))
