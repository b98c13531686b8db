"""``distcore plan``: what it says of a job without running it, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_pages import drawn_in
from text_task import TEXTS, UNTRACEABLE, WITHOUT_META_MODEL
from torch import nn

from distcore import ConfigError, footprint, load_config
from distcore.checkpoint import find
from distcore.cli.main import main
from distcore.model.optim import load_optimizer, optimizer_factory
from distcore.model.parameter_groups import parameter_groups
from distcore_workbench.planning.byte_sizes import format_size, parse_size
from distcore_workbench.planning.timeline import Moment, Step

pytestmark = pytest.mark.programs

JOB = ("--task", TEXTS, "--data", "rows.json")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON that the command prints, rows by strategy and ranks."""
    assert main(["plan", *JOB, "--json", *arguments]) == 0
    tree: dict[str, Any] = json.loads(capsys.readouterr().out)
    tree["rows"] = {(row["strategy"], row["ranks"]): row for row in tree["rows"]}
    return tree


@pytest.mark.programs  # as long as one
def test_each_row_of_eighty_columns_says_strategy_and_ranks(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = ["plan", *JOB, "--strategies", "single,fsdp", "--nproc", "1,4"]
    command += ["--device-memory", "24G"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        max(
            map(
                len,
                lines[
                    : lines.index("sizes are per rank; sent: bytes in a step of one micro-batch")
                ],
            )
        )
        <= 80
    )
    tables = [number for number, line in enumerate(lines) if line.startswith("strategy, ranks ")]
    assert len(tables) > 1
    for number in tables:
        rows = [line.partition("  ")[0] for line in lines[number + 1 : number + 4]]
        assert rows == ["single, 1", "fsdp, 1", "fsdp, 4"]
    longest = [line.partition(":")[0] for line in lines if line.startswith("longest micro-batch")]
    assert longest == [
        "longest micro-batch (single on 1, fsdp on 1)",
        "longest micro-batch (fsdp on 4)",
    ]


def test_a_batch_that_so_many_ranks_cannot_share_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("distcore_ddp")
    ask = [
        "plan",
        "--model",
        "bert-tiny",
        "--max-seq-len",
        "16",
        "--strategies",
        "ddp",
        "--nproc",
        "2,4",
    ]
    assert main([*ask, "--global-batch-size", "6"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "rows in a step" in line]
    assert said == ["ddp on 4: with 8 rows in a step; so many ranks cannot share 6 equally"]


def test_the_page_has_bars_and_a_timeline(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *JOB, "--strategies", "single,fsdp:no", "--html", "plan.html"]) == 0
    text = (work_folder / "plan.html").read_text(encoding="utf-8")
    bars, timeline = drawn_in(work_folder / "plan.html")["figures"]
    kinds = ["parameters", "gradients", "optimizer", "activations"]
    assert [trace["name"] for trace in timeline["traces"]] == kinds
    # at last the sums, in writing
    assert [trace.get("name") for trace in bars["traces"]] == [*kinds, None]
    assert [mark["text"] for mark in timeline["layout"]["annotations"]] == [
        "forward",
        "backward",
        "step",
    ]
    assert text.count('class="plot"') == 2
    assert "fsdp:no on 1 rank(s): not known" in text
    capsys.readouterr()
    assert main(["plan", *JOB, "--html", "none/plan.html"]) == 2
    assert (
        capsys.readouterr().err
        == "error: --html none/plan.html: cannot be written: No such file or directory\n"
    )


@pytest.mark.usefixtures("work_folder")
def test_frozen_parameters_have_neither_gradients_nor_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    frozen = plan(capsys, "--freeze", "embeddings")
    memory = frozen["rows"]["single", 1]["memory"]
    assert frozen["trained"] < frozen["parameters"]
    assert memory["gradients"] == 4 * frozen["trained"]
    assert memory["optimizer"] == pytest.approx(8 * frozen["trained"], rel=1e-3)


@pytest.mark.usefixtures("work_folder")
@pytest.mark.programs  # as long as one
def test_a_start_that_takes_more_than_a_step_is_the_peak() -> None:
    def moment(phase: Any, size: int) -> Moment:
        return Moment(phase=phase, parameters=size, gradients=0, optimizer=0, activations=5)

    step = Step(peak=moment("forward", 10), moments=(moment("forward", 10),))
    assert step.after(moment("start", 10)) is step
    assert step.after(moment("start", 11)).peak.phase == "start"


def test_a_frozen_model_is_held_beside_the_trained_one(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(task: str, strategy: str, *arguments: str) -> dict[str, Any]:
        sizes = ("--device", "cpu", "--nproc", "2", "--global-batch-size", "4")
        command = ["plan", "--json", "--task", task, "--strategies", strategy, *sizes, *arguments]
        assert main(command) == 0
        (planned,) = json.loads(capsys.readouterr().out)["rows"]
        return dict(planned)

    for strategy in ("ddp", "fsdp"):
        alone, beside = row("causal-lm", strategy), row("preference", strategy)
        assert beside["memory"]["parameters"] == 2 * alone["memory"]["parameters"]
        assert beside["memory"]["gradients"] == alone["memory"]["gradients"]
        assert (
            max(moment["parameters"] for moment in beside["step"]["moments"])
            == beside["memory"]["parameters"]
        )
    adapter, asked = row("causal-lm", "ddp", "--lora", "4"), row("preference", "ddp", "--lora", "4")
    assert asked["memory"]["parameters"] == adapter["memory"]["parameters"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nproc", "2048"), "--nproc 2048: a plan is for 1 to 1024 ranks"),
        (
            ("--nproc", "two"),
            "--nproc two: expected numbers of ranks separated by commas, such as 8,64",
        ),
        (("--device-memory", "80"), "--device-memory 80: expected a size such as 80G or 512M"),
        (
            ("--device", "xpu"),
            (
                "--device xpu: torch sees none here; say how much memory one has, such as"
                " --device-memory 80G"
            ),
        ),
        (("--device", "abacus"), "device = 'abacus': torch knows no such device type (here: cpu)"),
        (
            ("--strategies", "ddp,,fsdp"),
            "--strategies ddp,,fsdp: expected names separated by commas",
        ),
    ],
)
def test_wrong_input_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *JOB, *arguments]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.usefixtures("work_folder")
def test_a_strategy_that_is_not_installed_is_an_error_and_no_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *JOB, "--strategies", "ddp,fdsp"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: no strategy named 'fdsp' ")


@pytest.mark.usefixtures("work_folder")
def test_a_model_that_cannot_be_a_skeleton_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--data", "rows.json", "--task", WITHOUT_META_MODEL]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "error: plan: the model cannot be built without its weights: build_model() fails"
    )
    assert said.count("\n") == 1


@pytest.mark.usefixtures("work_folder")
def test_a_model_that_cannot_be_traced_is_planned_by_its_states(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--data", "rows.json", "--task", UNTRACEABLE]) == 0
    text = capsys.readouterr().out
    (said,) = (line for line in text.splitlines() if "activations are not known" in line)
    assert "BertForSequenceClassification cannot be traced: loss() fails without values" in said


@pytest.mark.parametrize("size", ["80G", "80GiB", "80 gb", "81920M", "0.078125T"])
def test_sizes_are_read(size: str) -> None:
    assert parse_size(size) == 80 * 2**30


def test_sizes_are_shown_to_three_digits() -> None:
    assert [format_size(size) for size in (0, 12, 1536, 12_033_252, 80 * 2**30)] == [
        "0", "12 B", "1.50 KiB", "11.5 MiB", "80.0 GiB",
    ]  # fmt: skip
    with pytest.raises(ConfigError):
        parse_size("0G")


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon", "lion"])
def test_an_optimizer_keeps_on_the_meta_device_what_it_keeps_of_values(name: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(5, 4), *(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        )

    config = load_config(None, {"optimizer.name": name, "lr": 1e-3, "device": "cpu"})
    with torch.device("meta"):
        planned = footprint.optimizer_bytes(optimizer_factory(config)(model()))
    module, own = model(), load_optimizer(config)
    optimizer = own.build(
        module, parameter_groups(config, module, getattr(own, "weight_decay", None))
    )
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    assert planned == sum(value.nbytes for value in kept)


@pytest.mark.programs
def test_a_checkpoint_has_the_size_that_was_planned(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = plan(capsys)["checkpoint"]
    out = work_folder / "run"
    assert main(["train", *JOB, "--max-steps", "2", "--set", "device=cpu", "--out", str(out)]) == 0
    newest = find("auto", out)
    assert newest is not None
    files = list(newest.rglob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert sum(file.stat().st_size for file in files) - headers == size
