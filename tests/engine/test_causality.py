"""A task that declares itself causal: a model that sees later tokens ends the run
before its first step.
"""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore import Causal, RunConfig, Simple, TaskError, train
from distcore.engine.causality import change_before, check_causal_kind
from distcore.plugin.task.bound import BoundTask

TOKENS = torch.randint(1, 20, (16, 9), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """One layer of attention over tokens."""

    def __init__(self, sees: str) -> None:
        super().__init__()
        self.sees = sees
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.sees == "next":  # the token after each one, and no other
            return self.head(hidden + F.pad(hidden[:, 1:], (0, 0, 0, 1)))  # type: ignore[no-any-return]
        if self.sees.endswith("rank 1 fails") and os.environ["RANK"] == "1":
            raise ValueError("a row that only this rank has")
        if self.sees == "noise":
            hidden = hidden + torch.randn_like(hidden)
        mixed = F.scaled_dot_product_attention(
            hidden, hidden, hidden, is_causal="all" not in self.sees
        )
        return self.head(hidden + mixed)  # type: ignore[no-any-return]


class Language(Simple):
    """A user's language model: the tokens are in the first place of a batch."""

    causal: Any = Causal(0, advice="pass is_causal=True")

    def __init__(self, sees: str = "past") -> None:
        super().__init__()
        self._sees = sees

    def data(self) -> Any:
        rows = torch.utils.data.TensorDataset(TOKENS)
        return rows, rows

    def model(self) -> nn.Module:
        return Net(self._sees)

    def row_loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0])[:, :-1].mT, batch[0][:, 1:], reduction="none").mean(
            1
        )


def trained(out: Path, task: Any, **changes: Any) -> None:
    config: dict[str, Any] = {
        "out": str(out / "run"),
        "lr": 1e-2,
        "max_steps": 1,
        "global_batch_size": 4,
        "device": "cpu",
        "nproc": 1,
        "extensions": {"progress": False, "metrics": False},
        "checkpoints": {"best": None},
        "prove": "off",
    }
    train(RunConfig(**config | changes), task)


@pytest.mark.parametrize("sees", ["all", "next"])
def test_a_model_that_sees_later_tokens_is_refused_before_the_run_folder_is_made(
    sees: str, tmp_path: Path
) -> None:
    problem = (
        r"^task Language: the model sees the tokens that it is to predict: .*; pass is_causal=True$"
    )
    with pytest.raises(TaskError, match=problem):
        trained(tmp_path, Language(sees))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sees", ["past", "noise"])
def test_a_causal_model_trains_also_if_its_outputs_have_noise(sees: str, tmp_path: Path) -> None:
    trained(tmp_path, Language(sees))


def test_a_causal_that_is_no_declaration_or_names_no_tokens_is_one_line(tmp_path: Path) -> None:
    task = Language()
    for causal, problem in (
        (True, "causal is True; expected a distcore.Causal"),
        (Causal("words"), r"no integers of shape \(n, length\) as 'words'; name the tokens"),
    ):
        task.causal = causal
        with pytest.raises(TaskError, match=problem):
            trained(tmp_path, task)


def small_one(sees: str) -> tuple[nn.Module, Tensor]:
    return Net(sees), TOKENS[:1]


@pytest.mark.parametrize("sees", ["all", "next"])
def test_a_small_model_of_the_kind_is_measured_before_any_rank_starts(sees: str) -> None:
    task = Language()
    task.causal = Causal(0, advice="mask it", small=partial(small_one, sees))
    with pytest.raises(TaskError, match=r"^task Language: the model sees .*; mask it$"):
        check_causal_kind(BoundTask.wrap(task))


def test_a_kind_that_cannot_be_measured_small_is_left_to_the_run() -> None:
    def fails() -> Any:
        raise KeyError("a layer that only the whole model has")

    task = Language()
    no_numbers = Net("past")
    nn.init.constant_(no_numbers.head.weight, math.nan)
    kinds: list[Any] = [
        None,
        lambda: None,
        fails,
        partial(small_one, "past"),
        lambda: (no_numbers, TOKENS[:1]),
    ]
    for small in kinds:
        task.causal = Causal(0, small=small)
        check_causal_kind(BoundTask.wrap(task))
    task.causal = None
    check_causal_kind(BoundTask.wrap(task))


@pytest.mark.parametrize("row", [[3, 3, 3, 3], [0, 0], [1, 2], [5, 5, 7], [4, 9, 2, 4, 9]])
def test_every_token_of_the_second_half_is_another_one(row: list[int]) -> None:
    seen: list[Tensor] = []

    def outputs_of(tokens: Tensor) -> Tensor:
        seen.append(tokens)
        return F.one_hot(tokens, 20).float()

    tokens, half = torch.tensor([row]), len(row) // 2
    assert change_before(outputs_of, tokens) == (0, 0)
    for other in seen[2:]:
        assert torch.equal(other[:, :half], tokens[:, :half])
        assert (other[:, half:] != tokens[:, half:]).all()
        assert int(other.min()) >= 0
    assert change_before(lambda tokens: tokens.flip(1)[..., None].float() + 1, tokens)[0] > 0


@pytest.mark.ranks
@pytest.mark.needs("distcore-ddp")
@pytest.mark.parametrize("sees", ["all", "all, but rank 1 fails"])
def test_ranks_end_alike_in_one_line(sees: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="the model sees the tokens that it is to predict"):
        trained(tmp_path, Language(sees), strategy="ddp", nproc=2, timeout=20)
