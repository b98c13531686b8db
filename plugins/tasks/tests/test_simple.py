"""Tasks of one's own: ``Simple``, from a file, or as an object that is given to ``train``."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from evaluated import evaluate_checkpoint
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from distcore import RunConfig, Simple, train
from distcore.cli.main import main
from distcore.errors import ConfigError, StrategyError, TaskError
from distcore.jobs.evaluate import config_for
from distcore.resolve import tasks

pytestmark = pytest.mark.programs  # its runs are whole ones


@dataclass(frozen=True)
class Lines(Simple):
    """Points on a line."""

    metrics: ClassVar = {"loss": "min", "near": "max"}
    slope: float = 2.0
    """Of the line."""

    def data(self) -> Any:
        x = torch.linspace(-1, 1, 40)[:, None]
        return TensorDataset(x, self.slope * x), TensorDataset(x[:7], self.slope * x[:7])

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def row_loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        distance: Tensor = model(batch[0]) - batch[1]
        return distance.square()[:, 0]

    def row_metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        return {"near": ((model(batch[0]) - batch[1]).abs() < 0.5).float()[:, 0]}


CONFIG = RunConfig()


def test_rows_are_collated_as_torch_does_and_count_one_each() -> None:
    data = Lines().prepare(CONFIG)
    x, y = data.train.batch(np.array([3, 0]))
    assert torch.equal(y, 2 * x)
    assert x.shape == (2, 1)
    assert (len(data.train), len(data.evaluation), data.test is data.evaluation) == (40, 7, True)
    assert data.train.items[np.arange(40)].tolist() == [1] * 40


def test_the_report_is_the_mean_of_each_metric_and_null_without_rows() -> None:
    task, data = Lines(), Lines().prepare(CONFIG)
    model = task.model()
    outputs = task.outputs(model, data.evaluation.batch(np.arange(7)))
    report = task.report(outputs, data)
    assert report["loss"] == pytest.approx(
        float(task.row_loss(model, data.evaluation.batch(np.arange(7))).detach().mean())
    )
    assert report.keys() == {"loss", "near"}
    assert task.report({}, data) == {"loss": None, "near": None}


def test_a_training_set_without_rows_is_refused(tmp_path: Path) -> None:
    class Empty(Lines):
        def data(self) -> Any:
            given, evaluation = super().data()
            return TensorDataset(*(tensor[:0] for tensor in given.tensors)), evaluation

    with pytest.raises(
        TaskError, match="its training set has no rows, so there is nothing to train on"
    ):
        train(RunConfig(out=str(tmp_path / "run"), max_steps=2, device="cpu"), Empty())


def test_a_mistyped_metric_is_named_before_the_first_step() -> None:
    class Mistyped(Lines):
        def row_metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
            return {"nera": super().row_metrics(model, batch)["near"]}

    data = Mistyped().prepare(CONFIG)
    with pytest.raises(
        TaskError,
        match=r"task Mistyped: .*returned \['nera'\], and `metrics` of .* \['near'\]: make",
    ):
        Mistyped().outputs(nn.Linear(1, 1), data.evaluation.batch(np.arange(7)))


def test_content_tells_rows_apart() -> None:
    one, other = (Lines(slope=slope).prepare(CONFIG).train for slope in (2.0, 3.0))
    assert one.content == Lines().prepare(CONFIG).train.content != other.content  # type: ignore[attr-defined]


class Masked:
    """Rows that differ between epochs."""

    def at(self, epoch: int) -> Any:
        return TensorDataset(torch.full((4, 1), float(epoch)), torch.zeros(4, 1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


def test_a_dataset_that_varies_is_asked_for_each_epoch() -> None:
    @dataclass(frozen=True)
    class Varies(Lines):
        def data(self) -> Any:
            return Masked(), Masked().at(0)

    rows: Any = Varies().prepare(CONFIG).train
    assert rows.at(3).batch(np.array([1]))[0].item() == 3
    assert rows.batch(np.array([1]))[0].item() == 0


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ((Stream(), Stream()), r"data\(\) returned a Stream, which cannot be indexed: .*law 7"),
        (
            (TensorDataset(torch.zeros(1)),),
            r"data\(\) returned tuple of 1; expected two or three datasets",
        ),
        (
            TensorDataset(torch.zeros(2)),
            r"returned TensorDataset of 2; .*return \(train, evaluation\) or",
        ),
    ],
)
def test_data_that_cannot_be_used_is_one_line(sets: Any, message: str) -> None:
    @dataclass(frozen=True)
    class Wrong(Lines):
        def data(self) -> Any:
            return sets

    with pytest.raises(TaskError, match=message):
        Wrong().prepare(CONFIG)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"near": torch.tensor(1.0)}, r"row_metrics\(\) returned 'near' of shape \(\) for"),
        (1.0, "returned float; expected"),
    ],
)
def test_a_metric_of_a_wrong_shape_names_its_method(
    returned: Any, message: str, tmp_path: Path
) -> None:
    class Wrong(Lines):
        def row_metrics(self, model: nn.Module, batch: list[Tensor]) -> Any:
            return returned

    with pytest.raises(TaskError, match=message):
        train(RunConfig(device="cpu", out=str(tmp_path / "run")), Wrong())


def test_a_class_in_the_place_of_an_object_names_the_call() -> None:
    class Unbuilt(Lines):
        def model(self) -> Any:
            return nn.Identity

    with pytest.raises(TaskError, match=r"was given the class; give Lines\(\)$"):
        train(CONFIG, Lines)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=r"was given a name; set task='lines\.py:Lines'$"):
        train(CONFIG, "lines.py:Lines")  # type: ignore[arg-type]
    with pytest.raises(
        TaskError, match=r"task Unbuilt: model\(\) returned the class Identity, not Identity\(\);"
    ):
        train(RunConfig(device="cpu"), Unbuilt())


@pytest.mark.programs
def test_an_object_is_recorded_with_its_options_and_cannot_be_built_again(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = train(
        RunConfig(max_steps=3, out=str(tmp_path / "run"), device="cpu"), Lines(slope=3.0)
    )
    assert report["evaluation"]["evaluated"] == 7
    saved = json.loads(next((tmp_path / "run/checkpoints").glob("*/state.json")).read_text())[
        "config"
    ]
    assert saved["task"] == "object:Lines"
    assert saved["task_options"] == {"slope": 3.0}
    with pytest.raises(
        StrategyError, match=r"was given to train\(\) as an object.*--task file\.py:Class"
    ):
        tasks.load_task(RunConfig.model_validate(saved))
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert main(["eval", str(tmp_path / "run"), "--task", file, "--json"]) == 0
    assert '"evaluated": 7' in capsys.readouterr().out
    path = tmp_path / "run/checkpoints/step-00000003"
    again = evaluate_checkpoint(config_for(path, 1, {}), path, Lines(slope=3.0))
    assert again["evaluation"] == report["evaluation"]
    with pytest.raises(
        ConfigError, match=r"task_options\.slope: train\(\) was given a task, which has its options"
    ):
        train(RunConfig(task_options={"slope": 1.0}, out=str(tmp_path / "two")), Lines(slope=3.0))


FILE = '''
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from beside import SLOPE
from distcore import Simple


@dataclass(frozen=True)
class Lines(Simple):
    slope: float = SLOPE
    """Of the line."""

    def data(self):
        x = torch.linspace(-1, 1, 40)[:, None]
        return TensorDataset(x, self.slope * x), TensorDataset(x[:7], self.slope * x[:7])

    def model(self):
        return nn.Linear(1, 1)

    def row_loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square()[:, 0]
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "lines.py").write_text(textwrap.dedent(FILE))
    (tmp_path / "beside.py").write_text("SLOPE = 4.0\n")
    return f"{tmp_path / 'lines.py'}:Lines"


@pytest.mark.programs
def test_a_task_from_a_file_trains_resumes_and_is_evaluated(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    job = [
        "train",
        "--task",
        file,
        "--set",
        "device=cpu",
        "--set",
        "task_options.slope=5",
        "--out",
        out,
    ]
    assert main([*job, "--max-steps", "4"]) == 0
    command = [*job, "--max-steps", "6", "--resume", "auto", "--resume-changed", "total_steps"]
    assert main(command) == 0
    assert main(["eval", out, "--json"]) == 0
    assert '"evaluated": 7' in capsys.readouterr().out
    refused = [*job, "--resume", "auto", "--max-steps", "6", "--set", "task_options.slope=6"]
    assert main(refused) == 2
    assert "task_options.slope was 5.0 and is 6.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x"], "unknown flag '--model'"),
        (["--set", "task_options.model=x"], "unknown option 'model' (options: slope)"),
        (
            ["--set", "task_options.slop=1"],
            "unknown option 'slop' (did you mean 'slope'?) (options: slope)",
        ),
        (["--set", "checkpoints.best=f1"], "checkpoints.best = 'f1': no metric of task"),
    ],
)
def test_an_option_that_the_task_does_not_use_is_refused(
    arguments: list[str], message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--task", file, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_class_that_the_file_lacks_is_named_with_the_nearest(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--task", file.replace(":Lines", ":Line")]) == 2
    assert "no class Line in" in (said := capsys.readouterr().err)
    assert "did you mean 'Lines'?" in said


def test_tensors_in_place_of_a_dataset_are_refused() -> None:
    class Bare(Lines):
        def data(self) -> Any:
            return (torch.zeros(4, 1), torch.zeros(4, 1)), (torch.zeros(4, 1), torch.zeros(4, 1))

    with pytest.raises(
        TaskError,
        match=r"task Bare: data\(\) returned tensors; make each set a TensorDataset of them",
    ):
        Bare().prepare(CONFIG)
