"""Options of distillation: those of text classification, the teacher, and the
weights of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

from pydantic import Field

from distcore import ConfigError, Direction, OnResume
from distcore_tasks.shared.answers import ConsultOnce
from distcore_tasks.shared.classification.predictions import METRICS
from distcore_tasks.text_classification.options import TextOptions


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(ConsultOnce, TextOptions):
    """Options of distillation."""

    metrics: ClassVar[dict[str, Direction]] = {**METRICS, "agreement": "max"}
    on_resume: ClassVar[dict[str, OnResume]] = TextOptions.on_resume | {
        "teacher": "free",  # a resumed run compares its weights
        "temperature": "ask",
        "label_weight": "ask",
        "hidden_weight": "ask",
        "consult_once": "ask",
    }

    model: str = "bert-tiny"
    """The student: built-in name, local Hugging Face folder, or hub name."""
    teacher: str = "bert-mini"
    """A trained classifier of the same classes: local Hugging Face folder, or hub
    name; built-in: random weights.
    """
    temperature: Annotated[float, Field(gt=0)] = 2.0
    """Divides the logits of student and teacher before they are compared."""
    label_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Weight of the labels in the loss; the rest is the teacher's."""
    hidden_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the cosine distance of the last hidden states of the first token; needs layers
    of the same size.
    """

    def __post_init__(self) -> None:
        """Check the problem type. Raises ConfigError."""
        super().__post_init__()
        if self.problem_type != "single_label":
            raise ConfigError(
                f"problem_type = {self.problem_type!r}: distillation compares probabilities of"
                " classes; leave it out"
            )
        object.__setattr__(self, "metrics", {**self.metrics, "agreement": "max"})

    @property
    def path_options(self) -> tuple[str, ...]:
        """Options with a file or a folder, the teacher's among them."""
        return (*super().path_options, *(["teacher"] if self.teacher not in self.built_in else []))

    @property
    def as_teacher(self) -> TextOptions:
        """The same options of text classification, for the teacher."""
        from distcore_tasks.text_classification.task import TextClassification

        same = {field.name: getattr(self, field.name) for field in fields(TextOptions)}
        return TextClassification(**same | {"model": self.teacher})

    def why_not_padding_free(self) -> str | None:
        """Return the reason why the model needs padding; ``None`` if it does not."""
        return (
            "its loss reads hidden states" if self.hidden_weight else super().why_not_padding_free()
        )
