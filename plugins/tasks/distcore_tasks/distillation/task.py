"""Distillation: a small classifier learns from labels and from a larger one, the teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from distcore_tasks.distillation.options import DistillationOptions
from distcore_tasks.text_classification.task import INPUTS, TextClassification

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import Datasets, FrozenModel, RunConfig
    from distcore_tasks.text_classification.datasets import TextDatasets

TEACHER, HIDDEN = "teacher_logits", "teacher_hidden"


@dataclass(frozen=True, kw_only=True)
class Distillation(DistillationOptions, TextClassification):
    """Text classification with a frozen teacher; implements ``distcore.plugin.task.task.Task``.

    The loss of a row is that of Hinton, Vinyals and Dean, https://arxiv.org/abs/1503.02531: the
    cross entropy of its label, and the divergence from the teacher's probabilities at a
    temperature, times its square. The cosine distance of hidden states is DistilBERT's,
    https://arxiv.org/abs/1910.01108, for the first token.
    """

    laws_hold: ClassVar = True

    def prepare(self, config: RunConfig) -> Datasets:
        """Return the datasets with the teacher's tokens.

        Raises DataError, ModelError or ConfigError.
        """
        from distcore_tasks.distillation.models import check_classes, check_sizes, check_tokens
        from distcore_tasks.shared.classification.heads import other_head
        from distcore_tasks.text_classification.datasets import prepare_text

        teacher = self.as_teacher
        check_tokens(self, teacher)
        if self.hidden_weight:
            check_sizes(self, teacher)
        data = prepare_text(teacher, config)
        check_classes(teacher, data.classes, self.data)
        warnings = [*data.warnings, *other_head(data.classes, self)]
        if teacher.from_scratch:
            warnings.append(
                f"teacher {self.teacher} has random weights: name a trained classifier with"
                " --teacher"
            )
        return self.with_answers(replace(data, warnings=tuple(warnings)))

    def frozen(self, config: RunConfig, data: Datasets) -> dict[str, FrozenModel]:
        """Return the teacher."""
        from distcore import FrozenModel
        from distcore_tasks.text_classification.models import build_classifier

        options: Any = self.as_teacher

        def build(config: RunConfig, data: Datasets) -> nn.Module:
            texts: TextDatasets | Any = data
            return build_classifier(
                options, texts.classes, vocab_size=texts.vocab_size, pad=texts.pad
            )

        weights = None if options.from_scratch else options.model_folder()
        return {"teacher": FrozenModel(build, weights)}

    def consult(
        self, frozen: Mapping[str, Callable[..., Any]], batch: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Add the teacher's logits, fp32 ``(n, classes)``, and its hidden state if needed.

        The hidden state is the last one of the first token, fp32 ``(n, size)``.
        """
        # Answers that were stored before the training are not asked for again.
        if TEACHER in batch:
            return batch
        answer = frozen["teacher"](**_inputs(batch), output_hidden_states=self.hidden_weight > 0)
        answered = batch | {TEACHER: answer.logits.float()}
        if self.hidden_weight:
            answered[HIDDEN] = answer.hidden_states[-1][:, 0].float()
        return answered

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss summed over the rows of ``batch``: fp32, without dimensions."""
        return self._scores(model, batch)[1].sum()

    def outputs(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of text classification; of rows with labels two more.

        These are the ``loss`` of distillation and the class that the ``teacher`` predicts.
        """
        if "labels" not in batch:
            return super().outputs(model, batch)
        logits, losses = self._scores(model, batch)
        outputs = self.problem.outputs(logits, batch["labels"])
        return outputs | {"loss": losses, "teacher": batch[TEACHER].argmax(-1)}

    def report(self, outputs: dict[str, Tensor], data: Datasets) -> dict[str, object]:
        """Return the metrics of text classification, and ``agreement`` with the teacher.

        The agreement is the share of rows for which both predict the same class.
        """
        agreement = None
        if "teacher" in outputs:
            is_same = outputs["prediction"] == outputs["teacher"]
            agreement = is_same.double().mean().item()
        return super().report(outputs, data) | {"agreement": agreement}

    def _scores(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the student's logits, ``(n, classes)``, and each row's loss, ``(n,)``; fp32."""
        from torch.nn.functional import cosine_similarity, cross_entropy, kl_div

        options = {"output_hidden_states": True} if self.hidden_weight else {}
        answer = model(**_inputs(batch), **options)
        logits = answer.logits.float()
        student = (logits / self.temperature).log_softmax(-1)
        teacher = (batch[TEACHER] / self.temperature).log_softmax(-1)
        divergence = kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
        # Its gradients shrink with the square of the temperature, those of the label do not.
        soft = divergence * self.temperature**2
        hard = cross_entropy(logits, batch["labels"], reduction="none")
        losses = self.label_weight * hard + (1 - self.label_weight) * soft
        if self.hidden_weight:
            first_token = answer.hidden_states[-1][:, 0].float()
            similarity = cosine_similarity(first_token, batch[HIDDEN], dim=-1)
            losses = losses + self.hidden_weight * (1 - similarity)
        return logits, losses


def _inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the arguments of a classifier, without labels and answers of the teacher."""
    return {name: batch[name] for name in INPUTS if name in batch}
