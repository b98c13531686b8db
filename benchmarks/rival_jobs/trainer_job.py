"""The HF Trainer with ``compute_loss_func``, which gets the items of the whole step."""

from __future__ import annotations

from typing import Any

import torch
from rival_jobs.common import Job, Order, collate, count, row_losses, serve, sum_of_losses
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Named(nn.Module):
    """The model with inputs and outputs by name."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap ``model``."""
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the logits."""
        return {"logits": self.model(tokens)}


class Stop(TrainerCallback):
    """Ends training after a step, as a callback may."""

    def __init__(self, step: int) -> None:
        """End after ``step``."""
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """Ask for the end."""
        control.should_training_stop = (
            control.should_training_stop or state.global_step == self.step
        )


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return the sum of the losses over the items of the step; in evaluation over
    those of the batch.
    """
    return sum_of_losses(outputs["logits"], labels) / (
        count(labels) if num_items_in_batch is None else num_items_in_batch
    )


def run(order: Order) -> None:
    """Train, and evaluate with ``predict``."""
    set_seed(0)
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
        "remove_unused_columns": False,
        "logging_steps": 1000,
    }
    trainer = Trainer(
        model=Named(job.model),
        args=TrainingArguments(output_dir=order.folder or f"{order.out}.run", **settings),
        train_dataset=job.train,
        data_collator=collate,
        compute_loss_func=loss_of,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=[Stop(order.last)],
    )
    trainer.train(resume_from_checkpoint=True if order.resume else None)
    losses = None
    if order.evaluate:
        outputs = trainer.predict(job.evaluation)
        losses = row_losses(
            torch.from_numpy(outputs.predictions), torch.from_numpy(outputs.label_ids)
        )
    if trainer.is_world_process_zero():
        job.write(job.model, losses)


if __name__ == "__main__":
    serve(run)
