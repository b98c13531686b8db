"""TRL's SFTTrainer, whose loss is a mean over the labeled tokens of the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from rival_jobs.common import IGNORED, Job, Order, Rows, row_losses, serve
from rival_jobs.trainer_job import Stop
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

PADDING = 0
"""Id of the token that the model leaves out."""


class Body(nn.Module):
    """All of the model but its head; each position has the hidden state of the row."""

    def __init__(self, model: Any) -> None:
        """Wrap ``model``, which has a ``head``."""
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """Return ``last_hidden_state``, shape ``(n, length, width)``."""
        seen: list[Tensor] = []
        hook = _head(self).register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0]))
        self.model(input_ids)
        hook.remove()
        return SimpleNamespace(
            last_hidden_state=seen[0][:, None].expand(-1, input_ids.shape[1], -1)
        )


# transformers leaves it untyped
class Causal(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """The model as a language model: the label of a row is the next token, once per item."""

    config_class = PreTrainedConfig
    base_model_prefix = "body"

    def __init__(self, model: nn.Module) -> None:
        """Wrap ``model``."""
        super().__init__(PreTrainedConfig())
        self.body = Body(model)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """Return the logits."""
        return SimpleNamespace(
            logits=self.get_output_embeddings()(self.body(input_ids).last_hidden_state)
        )

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return _head(self.body)


def _head(body: nn.Module) -> nn.Module:
    return body.get_submodule("model.head")


def tokenized(rows: Rows) -> Dataset:
    """Return rows as the trainer takes them: labels are shifted by one, and a row
    has a token for each.
    """
    made = []
    for index in range(len(rows)):
        tokens, labels = rows[index]["tokens"].tolist(), rows[index]["labels"].tolist()
        length = max(len(tokens), len(labels) + 1)
        made.append(
            {
                "input_ids": tokens + [PADDING] * (length - len(tokens)),
                "labels": [IGNORED, *labels] + [IGNORED] * (length - len(labels) - 1),
            }
        )
    return Dataset.from_list(made)


def run(order: Order) -> None:
    """Train, and evaluate with ``predict``."""
    job = Job(order)
    optimizer = job.optimizer()
    settings: Any = {
        "per_device_train_batch_size": order.batch,
        "per_device_eval_batch_size": order.batch,
        "use_cpu": True,
        "gradient_accumulation_steps": order.accumulation,
        "max_steps": order.steps,
        "max_grad_norm": 0.0,
        "save_strategy": "steps" if order.stop else "no",
        "save_steps": order.stop or 500,
        "report_to": [],
        "train_sampling_strategy": "random" if order.shuffle else "sequential",
        "disable_tqdm": True,
        "seed": 0,
        "logging_steps": 1000,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": None,
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    words = WordLevel({"<pad>": PADDING, "<eos>": 1}, unk_token="<pad>")
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")
    trainer = SFTTrainer(
        model=Causal(job.model),
        args=SFTConfig(output_dir=order.folder or f"{order.out}.run", **settings),
        train_dataset=tokenized(job.train),
        processing_class=tokenizer,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=[Stop(order.last)],
    )
    trainer.train(resume_from_checkpoint=True if order.resume else None)
    losses = None
    if order.evaluate:
        outputs = trainer.predict(tokenized(job.evaluation))
        logits, labels = (
            torch.from_numpy(values) for values in (outputs.predictions, outputs.label_ids)
        )
        losses = row_losses(logits[:, 0], labels[:, 1:])
    if trainer.is_world_process_zero():
        job.write(job.model, losses)


if __name__ == "__main__":
    serve(run)
