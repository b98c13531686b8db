"""Losses and gradients of one batch are those of TRL's DPOTrainer, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from row_cases import row_of

from distcore import RunConfig
from distcore_tasks.preference.options import Tokenizer
from distcore_tasks.preference.task import Preference

theirs: Any = pytest.importorskip("trl", reason="needs TRL")
KINDS = {"dpo": "sigmoid", "ipo": "ipo", "hinge": "hinge"}


def gradients(loss: torch.Tensor, model: Any) -> torch.Tensor:
    return torch.cat(
        [gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))]
    ).double()


@pytest.mark.parametrize("loss", KINDS)
def test_loss_and_gradient_are_equal(loss: Any, tmp_path: Path) -> None:
    """In float64 within 3e-7, as our loss is in fp32. In fp32 both round, and ours is
    no farther from float64.
    """
    _, _, exact, theirs_exact = both(loss, torch.float64, tmp_path / "exact")
    assert largest_difference(exact, theirs_exact) <= 3e-7
    given, expected, mine, other = both(loss, torch.float32, tmp_path / "fp32")
    assert given == pytest.approx(expected, rel=1e-6)
    assert largest_difference(mine, other) <= 1e-6
    assert largest_difference(mine, theirs_exact) <= 1.5 * largest_difference(other, theirs_exact)


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def both(
    loss: Any, dtype: torch.dtype, folder: Path
) -> tuple[float, float, torch.Tensor, torch.Tensor]:
    """Return our loss, TRL's, our gradient and TRL's, of a model in ``dtype``."""
    from datasets import Dataset
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    pairs = str(Path(__file__).with_name("pairs.jsonl"))
    task = Preference(
        data=pairs, max_seq_len=40, tokenizer=Tokenizer(vocab_size=400), beta=0.3, loss=loss
    )
    config, data = RunConfig(), task.prepare(RunConfig())
    rows: Any = data.train
    model, reference = (seeded(seed, task, config, data).to(dtype) for seed in (0, 1))
    words = PreTrainedTokenizerFast(
        tokenizer_object=Words(WordLevel({"a": 0, "b": 1}, unk_token="a")),
        pad_token="a",
        eos_token="b",
    )
    settings = theirs.DPOConfig(
        str(folder),
        beta=0.3,
        loss_type=[KINDS[loss]],
        use_cpu=True,
        report_to="none",
        gradient_checkpointing=False,
        bf16=False,
    )
    texts = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "a"}])
    trainer = theirs.DPOTrainer(
        model, reference, args=settings, train_dataset=texts, processing_class=words
    )
    examples = [
        {
            f"{name}_ids": row_of(rows, name, index).tolist()
            for name in ("prompt", "chosen", "rejected")
        }
        for index in range(8)
    ]
    expected = trainer.compute_loss(model, trainer.data_collator(examples))
    with torch.no_grad():
        batch = task.consult({"reference": reference}, rows.batch(np.arange(8)))
    given = task.row_loss(model, batch, lambda *_: None).mean()
    return given.item(), expected.item(), gradients(given, model), gradients(expected, model)


def seeded(seed: int, task: Preference, config: RunConfig, data: Any) -> Any:
    torch.manual_seed(seed)
    return task.build_model(config, data).eval()
