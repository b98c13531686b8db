"""``distcore.train`` in a script or a notebook: it starts ranks itself, and says what is
wrong in one line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from pydoc import render_doc
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn
from user_file import task_file

from distcore import (
    Clip,
    ConfigError,
    Datasets,
    ModelError,
    RankError,
    RunConfig,
    TaskError,
    launch,
    load_config,
    train,
)
from distcore.cli import FLAGS
from distcore.cli.task_flags import task_flags
from distcore.config import flatten
from distcore.config.key_help import GROUPS
from distcore.errors import DistcoreError
from distcore.launchers.processes import local
from distcore.launchers.processes.start_method import check_spawnable
from distcore.plugin.report import ReportKeys
from distcore.testing.problem import Problem

JOB = {
    "strategy": "ddp",
    "nproc": 2,
    "device": "cpu",
    "max_steps": 2,
    "extensions": {"progress": False},
}


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_train_starts_the_ranks_that_its_config_asks_for(work_folder: Path) -> None:
    options = {"data": "rows.json", "model": "bert-tiny"}
    report = train(RunConfig.model_validate(JOB | {"task_options": options, "out": "run"}))
    assert report["world_size"] == 2
    assert report["evaluation"]["evaluated"] == 4
    assert set(report) == ReportKeys.__required_keys__
    assert report["best"] is not None
    assert report["best"]["metric"] == "loss"


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_a_task_of_the_script_itself_comes_along(work_folder: Path) -> None:
    cell = ModuleType("cell")
    exec(TASK, vars(cell))  # a class that no rank could import
    report = train(RunConfig.model_validate(JOB | {"lr": 0.01, "out": "run"}), cell.Lines())
    assert (report["world_size"], report["steps"]) == (2, 2)


class Still(Problem):
    """With a model of which nothing is trained."""

    def build_model(self, config: RunConfig, data: Datasets) -> nn.Module:
        return super().build_model(config, data).requires_grad_(False)


@pytest.mark.parametrize(
    "metrics", [["loss"], "mae", lambda model, batch: {}], ids=["list", "str", "function"]
)
def test_metrics_of_another_type_are_one_line(metrics: Any, tmp_path: Path) -> None:
    task = type("Marked", (Problem,), {"metrics": metrics})()
    with pytest.raises(
        TaskError, match=r"task Marked: metrics is a \w+, expected a dict such as {'mae': 'min'}"
    ):
        train(RunConfig(device="cpu", out=str(tmp_path / "run"), max_steps=1, lr=0.1), task)


def test_a_model_of_which_nothing_is_trained_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model \w+: none of its parameters requires a gradient; nothing to train"
    ):
        train(RunConfig(device="cpu", out=str(tmp_path / "run"), max_steps=1, lr=0.1), Still())


TASK = """
import torch
from distcore import Simple

class Lines(Simple):
    def data(self):
        rows = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 40)[:, None], torch.ones(40, 1))
        return rows, rows

    def model(self):
        return torch.nn.Linear(1, 1)

    def row_loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square()[:, 0]
"""


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"modle": "bert-tiny"}, "RunConfig: unknown key 'modle' (did you mean 'model'?)"),
        ({"clip": {"nrom": 1.0}}, "RunConfig: unknown key 'clip.nrom' (did you mean 'norm'?)"),
        (
            {"layer_decay": 0.9},
            "RunConfig: unknown key 'layer_decay' (did you mean 'optimizer.layer_decay'?)",
        ),
        (
            {"text_colum": "body"},
            "RunConfig: unknown key 'text_colum' (did you mean 'text_column'?)",
        ),
        ({"clip_nrom": 1.0}, "RunConfig: unknown key 'clip_nrom' (did you mean 'clip_norm'?)"),
        (
            {"task_options": {"text_column": "body"}, "epochs": 0},
            (
                "RunConfig: epochs = 0: must be greater than or equal to 1; unknown key"
                " 'task_options.text_column' (did you mean 'columns.text'?)"
            ),
        ),
        (
            {"warmup": 10, "schedule": {"warmup_steps": 20}},
            "config: 'warmup' is short for 'schedule.warmup_steps', which is set too; keep one",
        ),
        (
            {"text_column": "body", "columns": {"text": "title"}},
            "config: 'columns' is short for 'task_options.columns', which is set too; keep one",
        ),
        ({"lora": 0}, "RunConfig: lora.rank = 0: must be greater than or equal to 1"),
        ({"epochs": 0}, "RunConfig: epochs = 0: must be greater than or equal to 1"),
        (
            {"epochs": 0, "sed": 1, "modle": 1},
            (
                "RunConfig: epochs = 0: must be greater than or equal to 1; unknown key 'sed' (did"
                " you mean 'seed'?); unknown key 'modle' (did you mean 'model'?)"
            ),
        ),
    ],
)
@pytest.mark.needs("distcore-tasks")
def test_a_wrong_config_is_one_line(given: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**given)
    assert str(caught.value) == line
    assert not isinstance(caught.value, ValidationError)


def keys_of_flags() -> dict[str, str]:
    """The name of each flag of a training as Python has it, with the key that it sets."""
    return {flag.name.removeprefix("--").replace("-", "_"): flag.key for flag in FLAGS}


def test_every_flag_is_a_key_by_its_name() -> None:
    values = {"strategy": "ddp", "optimizer": "sgd", "schedule": "cosine", "resume": "auto"}
    for name, key in keys_of_flags().items():
        if name == "packing":  # an earlier name, which is answered with a warning
            continue
        by_dots = flatten(RunConfig().model_dump(mode="json"))
        value = values.get(name, by_dots.get(key))
        assert load_config(None, {name: value}) == load_config(None, {key: value}), name
        assert RunConfig.model_validate({name: value}) == load_config(None, {key: value}), name


@pytest.mark.needs("distcore-tasks")
@pytest.mark.parametrize("task", ["text-classification", "causal-lm", "preference", "seq2seq"])
def test_every_flag_of_a_task_is_a_key_by_its_name(task: str) -> None:
    for flag in task_flags(task, taken={flag.name for flag in FLAGS}).flags:
        name = flag.name.removeprefix("--").replace("-", "_")
        expected = load_config(None, {"task": task, flag.key: "x"})
        assert load_config(None, {"task": task, name: "x"}) == expected, name
        assert RunConfig.model_validate({"task": task, name: "x"}) == expected, name


@pytest.mark.needs("distcore-tasks")
def test_flags_and_groups_of_keys_go_together() -> None:
    given = {"text_column": "body", "columns": {"label": "stars"}, "lora": 8, "ema": 0.99}
    config = RunConfig.model_validate(
        given | {"optimizer": "sgd", "weight_decay": 0.1, "clip_norm": "off"}
    )
    assert config.task_options == {"columns": {"text": "body", "label": "stars"}}
    assert (config.lora.rank, config.ema.decay, config.clip.norm) == (8, 0.99, None)
    assert (config.optimizer.name, config.optimizer.weight_decay) == ("sgd", 0.1)


def test_help_of_the_config_is_its_keys_in_groups_on_two_screens() -> None:
    text = re.sub(r".\x08", "", render_doc(RunConfig))  # without bold letters
    lines = [line.removeprefix(" |").strip() for line in text.splitlines()]
    assert len(lines) < 120
    for key in RunConfig.model_fields:
        assert [line for line in lines if line.split(" ")[0] == key], key
    assert "model_validate" not in text
    assert sum(len(keys) for keys in GROUPS.values()) == len(RunConfig.model_fields)


def test_completion_knows_the_keys_of_the_config() -> None:
    assert [*signature(RunConfig).parameters] == [*RunConfig.model_fields]


def test_an_optimizer_and_a_schedule_may_be_a_name_alone() -> None:
    config = RunConfig.model_validate({"optimizer": "sgd", "schedule": "cosine"})
    assert (config.optimizer.name, config.schedule.name) == ("sgd", "cosine")
    assert config == RunConfig.model_validate(
        {"optimizer": {"name": "sgd"}, "schedule": {"name": "cosine"}}
    )


@pytest.mark.parametrize(
    ("config", "task", "line"),
    [
        (Problem(), None, "config: expected a RunConfig, and was given a Problem"),
        ({"epochs": 1}, None, "config: expected a RunConfig, and was given a dict"),
        (RunConfig(), 5, r"task: expected an object with .*, and was given int"),
        (RunConfig(), nn.Linear(2, 2), r"task: expected an object with .*, and was given Linear"),
        (RunConfig(), {"lr": 1}, r"task: expected an object with .*, and was given dict"),
    ],
)
def test_arguments_of_train_in_another_order_are_one_line(
    config: Any, task: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as in a script, which pytest is not
    monkeypatch.setattr("logging.Logger.hasHandlers", lambda log: False)
    with pytest.raises(DistcoreError, match=line):
        train(config, task)


def test_a_wrong_part_of_a_config_is_one_line_too() -> None:
    with pytest.raises(ConfigError) as caught:
        Clip(nrom=1.0)  # type: ignore[call-arg]
    assert str(caught.value) == "Clip: unknown key 'nrom' (did you mean 'norm'?)"


@pytest.mark.needs("distcore-ddp")
def test_ranks_that_one_process_cannot_be_are_refused_before_they_start() -> None:
    with pytest.raises(
        ConfigError, match=r"^nproc = 2: strategy 'single' runs in one process; .*ddp"
    ):
        train(RunConfig(nproc=2, device="cpu"))


def test_a_function_that_spawned_ranks_cannot_be_given_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "start_method", lambda: "spawn")
    with pytest.raises(
        ConfigError, match=r"cannot be given to them: .*; define it at the top of a file$"
    ):
        launch(lambda: 1, nproc=1)


def test_spawned_ranks_cannot_import_what_a_notebook_defines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_spawnable(Path.cwd)
    notebook = ModuleType("__main__")  # as in a notebook it has no file
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    exec("def cell(): pass", vars(notebook))
    with pytest.raises(
        ConfigError, match=r"cannot import what a notebook or a prompt defines; move it to a file"
    ):
        check_spawnable(notebook.cell)


OWN_ERROR = task_file("return batch[7]")
RUN = 'train(RunConfig(strategy=sys.argv[1], nproc=int(sys.argv[2]), lr=0.1, out="run"), Own())'
PLACE = rf"own\.py:{1 + OWN_ERROR.splitlines().index('        return batch[7]')}"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("starter", "world", "lines", "which", "file"),
    [
        ("", "single 1", 1, "", "traceback.txt"),
        ("", "ddp 2", 1, "rank . of 2 failed: ", "rank-..txt"),
        (
            "-m torch.distributed.run --standalone --nproc-per-node 2",
            "ddp 2",
            2,
            "rank . of 2 failed: ",
            "rank-..txt",
        ),
    ],
    ids=["one process", "ranks", "torchrun"],
)
def test_an_error_in_the_users_code_is_one_line_that_names_its_place(
    work_folder: Path, starter: str, world: str, lines: int, which: str, file: str
) -> None:
    (work_folder / "own.py").write_text(f"{OWN_ERROR}\n\n{RUN}\n")
    command = [sys.executable, *starter.split(), "own.py", *world.split()]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == (1 if starter else RankError.exit_code)
    said = [line for line in done.stderr.splitlines() if "IndexError" in line]
    place = rf"traceback in (\S*run/errors/{file}); raised at {PLACE}"
    matches = [
        re.fullmatch(rf"(\[rank.\]: )?RankError: {which}IndexError: list .*; {place}", line)
        for line in said
    ]
    assert 1 <= len(matches) <= lines, done.stderr  # torchrun ends a rank that is slower
    assert starter or "Traceback" not in done.stderr
    for match in matches:
        assert match, said
        assert "return batch[7]" in Path(match[2]).read_text()


def test_an_error_in_the_users_code_can_be_caught_with_its_cause(work_folder: Path) -> None:
    (work_folder / "own.py").write_text(OWN_ERROR)
    own: dict[str, Any] = {"__name__": "own"}
    exec(compile((work_folder / "own.py").read_text(), "own.py", "exec"), own)
    with pytest.raises(RankError, match=rf"^IndexError: .*; raised at {PLACE}$") as caught:
        train(RunConfig(lr=0.1, nproc=1, device="cpu", out="run"), own["Own"]())
    assert isinstance(caught.value.__cause__, IndexError)


SCRIPT = """from distcore import RunConfig, Session, train
import sys
if __name__ == "__main__":
    {line}
"""
AT = r"; raised at script\.py:4\n"


@pytest.mark.programs
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "RunConfig(wrong_key=1)",
            r"RunConfig: unknown key 'wrong_key' \(help\(distcore\.RunConfig\) lists them\)",
        ),
        (
            "train(RunConfig(nproc=3, strategy='ddp', device='cpu'))",
            r"nproc=3: .*; use global_batch_size=33 or nproc=2",
        ),
        (
            "train(RunConfig(lora={'alpha': 8.0}))",
            r"lora\.alpha = 8\.0: does nothing without a rank; give lora\.rank=8",
        ),
        (
            "train(RunConfig(resume='auto'))",
            "resume = 'auto': needs out, the folder of the run to continue",
        ),
        (
            "Session(RunConfig(), 1, [])",
            "Session: model is a int; give a function that builds the model",
        ),
    ],
    ids=lambda text: text.partition("(")[0],
)
def test_a_script_ends_with_one_line_that_names_keys_and_its_own_line(
    work_folder: Path, line: str, said: str
) -> None:
    (work_folder / "script.py").write_text(SCRIPT.format(line=line))
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert re.fullmatch(rf"(Config|Task)Error: {said}{AT}", done.stderr), done.stderr


@pytest.mark.programs
@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "ranks:  1 rank (single)"),
        ("import logging; logging.basicConfig(level='INFO')", "INFO:distcore:ranks:  1"),
    ],
)
def test_a_script_with_one_rank_says_what_it_will_do(
    work_folder: Path, before: str, said: str
) -> None:
    job = (
        "if __name__ == '__main__':\n    train(RunConfig(max_steps=1, lr=0.1, out='run',"
        " device='cpu'), Lines())\n"
    )
    text = f"from distcore import RunConfig, train\n{before}\n{TASK}\n{job}"
    (work_folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=120, check=True
    )
    assert said in done.stderr


def test_advice_for_a_shell_stays_as_it_is_in_python() -> None:
    command = "distcore train run/config.yaml --out run --resume auto"
    error = ConfigError(f"stopped; go on with: {command}; or drop --device cpu, or use --lr")
    assert error._render_traceback_() == [
        f"ConfigError: stopped; go on with: {command}; or drop device='cpu', or use lr"
    ]
