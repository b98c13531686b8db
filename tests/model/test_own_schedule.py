"""Schedules of the user's own: a function of a file or a package, with options."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from work_folder import install

from distcore import CheckpointError, ConfigError, DistcoreError, RunConfig, Session, load_config
from distcore.checkpoint import find
from distcore.cli.main import main
from distcore.model.optim import check_schedule, scheduler_for
from distcore.model.run_schedule import SAMPLES, check_factors, schedule_options
from distcore.model.schedules import SCHEDULES, SUPPLIED, load_schedule

SOURCE = """
import random
from typing import Annotated

from pydantic import Field
from torch.optim.lr_scheduler import StepLR


def power(
    step, warmup_steps, total_steps, power: Annotated[float, Field(gt=0)] = 2.0, floor: float = 0.0
):
    left = (total_steps - step) / (total_steps - warmup_steps)
    return floor + (1 - floor) * left**power


def staircase(step, steps_per_epoch, peak_lr, lows: list[float] = [0.5]):
    return max(lows[0], 1 - 0.25 * (step // steps_per_epoch))


def late(step, total_steps):
    return 1.0 if step < total_steps else 1 / 0


def nothing(step):
    pass


def below(step):
    return 1 - step


def drawn(step):
    return random.random()


def needs_more(step, floor: float):
    return floor


def per_step(optimizer):
    return 1.0


number = 0.5
"""


@pytest.fixture
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(SOURCE)


def config(name: str, **settings: Any) -> RunConfig:
    return RunConfig(lr=0.1, schedule={"name": name, **settings})


def rates(config: RunConfig, steps: int, epoch: int = 1) -> list[list[float]]:
    """The rates of two groups at each step and after the last one."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.1, 1.0)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler = scheduler_for(config, optimizer, steps, epoch)
    assert scheduler is not None
    made = [scheduler.get_last_lr()]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        made.append(scheduler.get_last_lr())
    return [[round(float(rate), 6) for rate in rates_of_step] for rates_of_step in made]


@pytest.mark.usefixtures("_file")
def test_a_function_of_a_file_scales_every_group_after_the_warm_up() -> None:
    own = config("own.py:power", warmup_steps=2, power=1, floor=0.5)
    assert rates(own, 4) == [[0.0, 0.0], [0.05, 0.5], [0.1, 1.0], [0.075, 0.75], [0.05, 0.5]]
    assert schedule_options(own) == {"power": 1.0, "floor": 0.5}


@pytest.mark.usefixtures("_file")
def test_a_schedule_takes_what_it_names_and_holds_through_epochs() -> None:
    by_epoch = config("own.py:staircase", interval="epoch")
    assert [first for first, _ in rates(by_epoch, 6, epoch=2)] == [
        0.1, 0.1, 0.075, 0.075, 0.05, 0.05, 0.05,
    ]  # fmt: skip


def test_an_installed_schedule_is_named_like_one_of_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "distcore-mine", "[distcore.schedules]\nmine = sched_mine:half\n")
    (tmp_path / "sched_mine.py").write_text("def half(step):\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_schedule(config("mine"))
    assert rates(config("mine"), 1) == [[0.05, 0.5], [0.05, 0.5]]
    with pytest.raises(ConfigError, match=r"'min': no such schedule \(did you mean 'mine'\?\)"):
        check_schedule(config("min"))


def test_a_name_of_the_core_belongs_to_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "distcore-mine", "[distcore.schedules]\nlinear = sched_mine:half\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'linear': is the core's own, and distcore-mine 1.0"):
        check_schedule(config("linear"))


def test_schedules_of_the_core_name_what_they_are_given() -> None:
    for name in SCHEDULES:
        code = load_schedule(name).__code__
        assert {*code.co_varnames[: code.co_argcount]} <= {*SUPPLIED}


def check(own: RunConfig) -> None:
    """Check a schedule as a job does, before it starts a rank."""
    check_schedule(own)
    schedule_options(own)
    check_factors(own, total_steps=12, steps_per_epoch=4)


@pytest.mark.usefixtures("_file")
@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        ("nowhere.py:mine", {}, "schedule 'nowhere.py:mine': no file nowhere.py"),
        (
            "own.py:powr",
            {},
            "schedule 'own.py:powr': no function powr in own.py (did you mean 'power'?)",
        ),
        ("own.py:number", {}, "schedule.name = 'own.py:number': takes no step; expected a"),
        ("own.py:per_step", {}, "schedule.name = 'own.py:per_step': takes no step; expected a"),
        ("own.py:StepLR", {}, "schedule.name = 'own.py:StepLR': is a class; expected a function"),
        (
            "own.py:power",
            {"powr": 1},
            "unknown key 'schedule.powr' (did you mean 'power'?): own.py:power has power, floor",
        ),
        (
            "own.py:power",
            {"power": 0},
            "schedule 'own.py:power': power = 0: must be greater than 0",
        ),
        ("own.py:power", {"floor": "x"}, "schedule 'own.py:power': floor = 'x': expected"),
        ("own.py:needs_more", {}, "schedule 'own.py:needs_more': floor: field required"),
        ("linear", {"power": 1}, "unknown key 'schedule.power': linear has no options"),
        ("own.py:nothing", {}, "schedule.name = 'own.py:nothing': failed at step 0: TypeError: "),
        ("own.py:below", {}, "schedule.name = 'own.py:below': gave -1 for step 2; expected the"),
        ("own.py:late", {}, "schedule.name = 'own.py:late': failed at step 12: ZeroDivisionError"),
        ("own.py:drawn", {}, "schedule.name = 'own.py:drawn': gave "),
    ],
)
def test_what_is_wrong_with_a_schedule_is_one_line_before_any_step(
    name: str, settings: dict[str, Any], line: str
) -> None:
    with pytest.raises(DistcoreError) as raised:
        check(config(name, **settings))
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_a_long_run_is_tried_at_some_steps_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "steps = []\ndef mine(step):\n    steps.append(step)\n    return 1.0\n"
    )
    check_factors(config("own.py:mine"), total_steps=10**9, steps_per_epoch=4)
    steps = load_schedule("own.py:mine").__globals__["steps"]
    assert len(steps) < 3 * SAMPLES
    assert 10**9 in steps


def loss(model: Callable[[Tensor], Tensor], batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().sum()


def train(out: str, steps: int, **settings: Any) -> Tensor:
    """Take steps in a session under a schedule of a file, or go on with it; return the weight."""
    keys = {
        "out": out, "device": "cpu", "nproc": 1, "lr": 0.05, "max_steps": 8, "resume": "auto",
        "global_batch_size": 4, "schedule.name": "own.py:power", **settings,
    }  # fmt: skip
    x = torch.linspace(-1, 1, 16)[:, None]
    with Session(
        load_config(None, keys), lambda: nn.Linear(1, 1), TensorDataset(x, x.sin())
    ) as run:
        for step in run:
            step.gradients(loss)
            step.apply()
            if run.progress.step == steps:
                break
        return torch.cat([value.detach().flatten() for value in run.model.parameters()])


@pytest.mark.usefixtures("_file")
def test_a_session_follows_it_and_a_resumed_one_goes_on_bit_for_bit() -> None:
    whole = train("whole", 8)
    train("parts", 3)
    assert torch.equal(train("parts", 8), whole)
    assert not torch.equal(train("other", 8, **{"schedule.power": 3}), whole)


@pytest.mark.usefixtures("_file")
def test_a_resume_with_edited_code_of_the_schedule_is_refused_unless_accepted() -> None:
    train("run", 3)
    Path("own.py").write_text(SOURCE.replace("(1 - floor) * left", "(1 - floor) * 0.9 * left"))
    with pytest.raises(CheckpointError, match=r"the learning rate was .*own.py:power' now gives"):
        train("run", 8)
    train("run", 8, resume_changed="schedule")
    assert find("auto", Path("run")) is not None


@pytest.mark.parametrize("words", ["--schedule linaer", "--schedule nowhere.py:mine"])
def test_a_slip_in_the_name_is_told_without_torch(words: str) -> None:
    code = (
        "import sys; from distcore.cli.main import main; code = main(sys.argv[1:]);"
        " assert 'torch' not in sys.modules; sys.exit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "train", *words.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("error: schedule")


@pytest.mark.usefixtures("_file")
def test_options_of_the_schedule_of_a_file_go_with_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("run.yaml").write_text("schedule: {name: 'own.py:power', power: 3, warmup_steps: 2}\n")
    other = load_config("run.yaml", {"schedule.name": "cosine"})
    assert (other.schedule.options, other.schedule.warmup_steps) == ({}, 2)
    assert load_config("run.yaml", {}).schedule.options == {"power": 3}
    assert main(["train", "run.yaml", "--set", "schedule.powr=1"]) == 2
    assert "unknown key 'schedule.powr' (did you mean 'power'?)" in capsys.readouterr().err
