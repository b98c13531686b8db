"""Options of a task in a config: full keys, short ones, and configs of before tasks had options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from distcore.config import RunConfig, canonical, dump_config, load_config
from distcore.errors import ConfigError
from distcore.resolve import tasks
from distcore.resolve.resolve import resolve
from distcore_tasks.text_classification.options import Columns
from distcore_tasks.text_classification.task import TextClassification

OLD: dict[str, Any] = {
    "task": "text-classification",
    "model": "bert-tiny",
    "data": "rows.json",
    "eval_data": None,
    "test_data": None,
    "eval_fraction": 0.2,
    "columns": {"text": "body", "label": "topic"},
    "tokenizer": {"vocab_size": 500},
    "max_seq_len": 32,
    "dropout": None,
    "epochs": 3,
    "checkpoints": {"best": "accuracy"},
}
"""A recorded config from before tasks had options."""
TASK = TextClassification(
    model="bert-tiny",
    data="rows.json",
    eval_fraction=0.2,
    columns=Columns("body", "topic"),
    max_seq_len=32,
)


def test_an_old_config_builds_the_same_task(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(OLD))
    for config in (RunConfig.model_validate(OLD), load_config(str(tmp_path / "config.yaml"), {})):
        task: Any = tasks.load_task(config).task
        assert task.columns == TASK.columns
        assert (task.model, task.eval_fraction, task.max_seq_len, task.dropout) == (
            "bert-tiny",
            0.2,
            32,
            None,
        )
        assert task.tokenizer.vocab_size == 500
        assert (config.epochs, config.checkpoints.best) == (3, "accuracy")


def test_keys_that_a_task_has_not_are_unknown_and_those_of_a_task_that_is_missing_are_kept(
    tmp_path: Path,
) -> None:
    (tmp_path / "lines.py").write_text(
        "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Lines:\n    slope:"
        " float = 2.0\n"
    )
    own = f"{tmp_path}/lines.py:Lines"
    with pytest.raises(ConfigError, match=r"unknown key 'modle' \(did you mean 'model'\?\)"):
        RunConfig.model_validate({"modle": "bert-tiny"})
    with pytest.raises(ConfigError, match=r"unknown key 'columns'"):
        RunConfig.model_validate({"task": own, "columns": {"text": "body"}})
    assert RunConfig.model_validate({"task": own, "slope": 2}).task_options == {"slope": 2}
    assert RunConfig.model_validate({"task": "mine", "model": "small"}).task_options == {
        "model": "small"
    }


def test_a_short_key_and_the_full_one_set_the_same_option() -> None:
    for changes in ({"columns.text": "body"}, {"task_options.columns.text": "body"}):
        task: Any = tasks.load_task(load_config(None, changes)).task
        assert task.columns == Columns(text="body")
    assert canonical("columns.text") == "task_options.columns.text"
    assert canonical("optimizer.eps") == "optimizer.eps"


def test_a_flag_overrides_what_a_file_sets_in_either_form(tmp_path: Path) -> None:
    for text in ("model: bert-mini\n", "task_options: {model: bert-mini}\n"):
        (tmp_path / "job.yaml").write_text(text)
        assert load_config(str(tmp_path / "job.yaml"), {"model": "bert-tiny"}).task_options == {
            "model": "bert-tiny"
        }


def test_an_option_given_in_short_and_in_full_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'model' is short for 'task_options\.model', which is set too; keep one"
    ):
        RunConfig.model_validate({"model": "a", "task_options": {"model": "b"}})


def test_a_resolved_config_has_every_option_and_the_metric_of_the_best() -> None:
    resolved = resolve(load_config(None, {"model": "bert-tiny", "device": "cpu"})).config
    assert resolved.task_options["columns"] == {
        "text": "text", "label": "label", "id": None, "text_pair": None,
    }  # fmt: skip
    assert resolved.task_options["max_seq_len"] == 128
    assert resolved.checkpoints.best == "loss"
    again = yaml.safe_load(dump_config(resolved))
    assert again["task_options"]["model"] == "bert-tiny"
    assert not {"model", "columns", "dropout"} & again.keys()
