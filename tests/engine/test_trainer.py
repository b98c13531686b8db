"""Decisions of the trainer itself: the best evaluation, and which run folders it takes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distcore import Evaluation, Progress, RunConfig, train
from distcore.engine.best import Best, saved_best, update_best
from distcore.errors import CheckpointError, ConfigError
from distcore.files import strict_json
from distcore.model.model_source import enable_recomputation
from distcore.plugin.task.task import Direction
from distcore.resolve.run_folder import check_out
from distcore.testing.problem import Problem


def evaluation(**metrics: float) -> Evaluation:
    return Evaluation(outputs={}, metrics=dict(metrics), evaluated=1, unique=1, dataset_size=1)


METRICS: dict[str, Direction] = {"loss": "min", "f1": "max"}


@pytest.mark.parametrize(
    ("loss", "improves"), [(0.4, True), (0.5, False), (math.nan, False), (math.inf, False)]
)
def test_a_loss_is_better_if_it_is_lower_and_a_number(loss: float, improves: bool) -> None:
    before = Best(step=1, metric="loss", value=0.5, waited=1)
    best, improved = update_best(Progress(step=2), before, evaluation(loss=loss), "loss", METRICS)
    assert improved is improves
    assert best == (
        Best(step=2, metric="loss", value=loss) if improves else replace(before, waited=2)
    )


def test_a_metric_of_which_more_is_better_and_one_that_is_a_whole_number() -> None:
    before = Best(step=1, metric="f1", value=2.0)
    best, improved = update_best(Progress(step=2), before, evaluation(f1=3), "f1", METRICS)
    assert (best, improved) == (Best(step=2, metric="f1", value=3.0), True)
    assert not update_best(Progress(step=2), before, evaluation(f1=1), "f1", METRICS)[1]


@pytest.mark.parametrize(
    "saved", [None, {}, {"metric": "loss", "step": "1", "value": 2.0}, [1], {"metric": "accuracy"}]
)
def test_a_saved_best_of_another_metric_or_form_is_none_to_beat(saved: object) -> None:
    assert saved_best(saved, "loss") is None
    assert saved_best({"metric": "loss", "step": 1, "value": 0.5}, "loss") == Best(
        step=1, metric="loss", value=0.5
    )


def test_json_has_null_for_what_is_not_a_number() -> None:
    assert json.loads(strict_json({"loss": math.nan, "parts": [1.0, math.inf]})) == {
        "loss": None,
        "parts": [1.0, None],
    }


def test_a_run_folder_is_resumed_only_from_its_own_checkpoints(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name / "checkpoints/step-00000001").mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    own = RunConfig(
        out=str(tmp_path / "one"), resume=str(tmp_path / "one/checkpoints/step-00000001")
    )
    check_out(own)
    with pytest.raises(ConfigError, match="holds another run"):
        check_out(own.model_copy(update={"out": str(tmp_path / "other")}))


@pytest.mark.needs("distcore-ddp")
def test_a_process_can_train_again_after_a_run_that_failed(tmp_path: Path) -> None:
    config = RunConfig(
        strategy="ddp",
        out=str(tmp_path / "run"),
        max_steps=1,
        global_batch_size=4,
        lr=0.01,
        device="cpu",
    )
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        train(config.model_copy(update={"resume": str(tmp_path / "nowhere")}), Problem())
    assert train(config, Problem())["steps"] == 1


def test_a_model_that_says_that_it_cannot_recompute_is_refused() -> None:
    """Each model of transformers has the method, also those that raise in it."""

    class Refusing(torch.nn.Linear):
        def gradient_checkpointing_enable(self) -> None:
            raise ValueError("Refusing does not support gradient checkpointing.")

    with pytest.raises(
        ConfigError, match=r"^gradient_checkpointing: Refusing does not offer it; leave it off \("
    ):
        enable_recomputation(Refusing(2, 2))
    model = Refusing(2, 2)
    model.supports_gradient_checkpointing = False  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"does not offer it; leave it off$"):
        enable_recomputation(model)


def test_gradient_checkpointing_is_refused_where_the_model_has_none(tmp_path: Path) -> None:
    config = RunConfig(
        out=str(tmp_path / "run"), max_steps=1, gradient_checkpointing=True, lr=0.01, device="cpu"
    )
    with pytest.raises(ConfigError, match="gradient_checkpointing: Classifier does not offer it"):
        train(config, Problem())
