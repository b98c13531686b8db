"""The figures of a log line are those of a count by hand, whatever cuts,
spreads or interrupts the steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from text_task import TEXTS

from distcore import ConfigError, StrategyError, launch, load_config, train
from distcore_workbench.observe.observe import TIMED, Observe
from distcore_workbench.observe.slots import SENT, Slots

pytestmark = pytest.mark.programs  # its runs are whole ones

PEAK = 0.5
STEPS = 4
OBSERVED = {
    "task": TEXTS,
    "max_steps": STEPS,
    "global_batch_size": 40,
    "device": "cpu",
    "log_every": 2,
    "log_level": "error",
    "extensions.progress": False,
    "extensions.observe": {"peak_tflops": PEAK},
    "checkpoints.best": None,
    "prove": "off",  # its copy takes memory and time after the second step
}
LENGTHS = [5] * 40
"""Tokens of the rows of ``work_folder``: three words between two marks."""
SLOW = """
from time import sleep
from distcore import hookimpl

class Slow:
    @hookimpl(wrapper=True)
    def backward(self):
        sleep(0.1)
        return (yield)
    @hookimpl(wrapper=True)
    def step(self):
        sleep(0.2)
        return (yield)
    @hookimpl
    def on_evaluation_end(self):
        sleep(0.4)
    @hookimpl
    def on_checkpoint(self):
        sleep(0.5)
"""


def lines_of(changes: dict[str, Any], out: Path) -> list[dict[str, float]]:
    """Train, and return the log lines, without their prefix."""
    config = load_config(None, OBSERVED | changes | {"out": str(out)})
    launch(train, config, nproc=int(config.nproc)) if config.nproc != "auto" else train(config)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [
        {key.removeprefix("train/"): line[key] for key in line}
        for line in lines
        if "train/loss" in line
    ]


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, 1),
        ({"micro_batch_size": 4}, 1),
        ({"eval_every": 1, "save_every": 1, "loader.workers": 1}, 1),
        pytest.param(
            {"strategy": "ddp", "nproc": 2, "micro_batch_size": 4},
            2,
            marks=[pytest.mark.needs("distcore-ddp"), pytest.mark.ranks],
        ),
    ],
)
def test_figures_are_those_of_a_count_by_hand(
    changes: dict[str, Any], ranks: int, work_folder: Path, tmp_path: Path
) -> None:
    flops = sum(
        6 * (128**2 + 2 * 128) + 6 * 2 * 12 * 128**2 * tokens + 6 * 4 * 128 * tokens**2
        for tokens in LENGTHS
    )
    lines = lines_of(changes, tmp_path / "run")
    assert len(lines) == STEPS // 2
    for line in lines:
        seconds = 2 * len(LENGTHS) / line["samples_per_second"]
        assert line["tokens_per_second"] * seconds == pytest.approx(2 * sum(LENGTHS))
        assert line["model_flops"] == pytest.approx(flops)
        assert line["mfu"] == pytest.approx(2 * flops / seconds / (ranks * PEAK * 1e12))
        assert line["peak_memory_max_rank"] in range(ranks)
        assert line["peak_memory_max_bytes"] >= line["peak_memory_bytes"] - 2**20
        assert not [name for name in line if "_of_slot_" in name]
        assert all(line[f"{phase}_seconds"] >= 0 for phase in TIMED)
        assert (
            min(line[f"{phase}_seconds"] for phase in ("forward", "backward", "step", "data")) > 0
        )


@pytest.mark.usefixtures("work_folder")
def test_time_stands_where_it_was_spent(tmp_path: Path) -> None:
    Path("slow.py").write_text(SLOW)
    changes = {
        "micro_batch_size": 20,
        "eval_every": 1,
        "save_every": 1,
        "extensions.slow.py:Slow": True,
    }
    changes["checkpoints.asynchronous"] = False  # else the end of a save is told after a later step
    first, last = lines_of(changes, tmp_path / "run")
    # An evaluation and a save after each step; those of the last step come after the last line.
    spent = {"backward": 2 * 2 * 0.1, "step": 2 * 0.2, "evaluation": 2 * 0.4, "save": 2 * 0.5}
    for phase, seconds in spent.items():
        assert seconds <= last[f"{phase}_seconds"] < seconds + 0.5
    assert (first["evaluation_seconds"], first["save_seconds"]) != (0, 0)
    trained = sum(
        last[f"{phase}_seconds"] for phase in TIMED if phase not in ("evaluation", "save")
    )
    assert trained == pytest.approx(2 * len(LENGTHS) / last["samples_per_second"], rel=0.1)


COUNTS = """
from pathlib import Path
from distcore import hookimpl

class Counts:
    calls = 0

    @hookimpl(wrapper=True)
    def reduce_loss(self):
        self.calls += 1
        return (yield)
    @hookimpl(wrapper=True)
    def gather_outputs(self):
        self.calls += 1
        return (yield)
    @hookimpl
    def on_run_end(self, run):
        Path(run.config.out, f"calls-{run.world.rank}").write_text(str(self.calls))
"""


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
@pytest.mark.usefixtures("work_folder")
def test_ranks_communicate_as_often_as_without_it(tmp_path: Path) -> None:
    Path("counts.py").write_text(COUNTS)
    calls = []
    for observed in (True, False):
        out = tmp_path / f"run-{observed}"
        changes = {
            "strategy": "ddp",
            "nproc": 2,
            "extensions.counts.py:Counts": True,
            "extensions.observe": observed,
        }
        lines_of(changes, out)
        calls.append([(out / f"calls-{rank}").read_text() for rank in range(2)])
    assert calls[0] == calls[1]


TEXT_ROWS = [{"text": "a word " * (1 + n % 9)} for n in range(40)]
PAIRS = [{"prompt": "a word", "completion": " b" * (1 + n % 9)} for n in range(40)]
WORDS = 4 * sum(range(1, 10)) + 1 + 2 + 3 + 4


@pytest.mark.needs("distcore-tasks")
@pytest.mark.parametrize(
    ("rows", "tokens"),
    # Documents follow each other, each with two marks, and the last token is no input; a pair
    # has its prompt.
    [(TEXT_ROWS, 2 * WORDS + 2 * 40 - 1), (PAIRS, WORDS + 2 * 40)],
)
def test_real_tokens_of_an_epoch_are_the_same_with_any_form_of_the_rows(
    rows: list[dict[str, str]], tokens: int, work_folder: Path, tmp_path: Path
) -> None:
    (work_folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "causal-lm",
        "task_options.data": "texts.jsonl",
        "task_options.eval_data": "texts.jsonl",
    }
    epoch = {"max_steps": None, "epochs": 1, "global_batch_size": 4, "log_every": 1}
    flops = set()
    for form in ({"padding_free": "off"}, {"padding_free": "on"}, {"task_options.packing": "on"}):
        lines = lines_of(task | epoch | form, tmp_path / f"run{len(list(tmp_path.iterdir()))}")
        steps = zip(lines, [0, *(line["samples"] for line in lines)], strict=False)
        seconds = [
            (line["samples"] - before) / line["samples_per_second"] for line, before in steps
        ]
        counted = sum(
            line["tokens_per_second"] * one for line, one in zip(lines, seconds, strict=True)
        )
        assert counted == pytest.approx(tokens)
        flops.add(round(sum(line["model_flops"] for line in lines)))
    assert max(flops) == pytest.approx(min(flops), rel=1e-9)


@pytest.mark.parametrize(
    ("patience", "changes", "counted"),
    # After step 2 a second has gone by at the evaluation, which follows the log line.
    [
        (60.0, {}, []),
        (-1.0, {}, [1, 2, 3]),
        (1.0, {"eval_every": 2, "extensions.slow.py:Slow": True}, [2, 3]),
    ],
)
@pytest.mark.usefixtures("work_folder")
def test_operations_are_counted_once_a_run_has_lasted(
    patience: float,
    changes: dict[str, Any],
    counted: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("slow.py").write_text(SLOW)
    monkeypatch.setattr("distcore_workbench.observe.observe.PATIENCE", patience)
    lines = lines_of(changes | {"extensions.observe": True, "max_steps": 6}, tmp_path / "run")
    assert [number for number, line in enumerate(lines, 1) if "model_flops" in line] == counted


def test_a_rank_of_many_sends_in_its_turn() -> None:
    class Run:
        def __init__(self, rank: int) -> None:
            self.world, self.sent = type("World", (), {"rank": rank}), dict[str, float]()
            self.tally = type(
                "Tally", (), {"add": lambda _, name, value: self.sent.update({name: value})}
            )()

    ranks = [Run(rank) for rank in range(40)]
    slots = [Slots(40) for _ in ranks]
    for turn in range(3):
        record: dict[str, float] = {"loss": 1.0}
        for run, mine in zip(ranks, slots, strict=True):
            run.sent.clear()
            rank = run.world.rank  # type: ignore[attr-defined]
            if mine.is_turn_of(rank):
                mine.send(run, dict.fromkeys(SENT, 1000.0 + rank))  # type: ignore[arg-type]
            assert not record.keys() & run.sent.keys()
            record |= run.sent
        for mine in slots:
            mine.read(seen := dict(record))
            assert seen == {"loss": 1.0}
            assert [*mine.news] == [*range(40)][16 * turn : 16 * turn + 16]
    assert slots[0].values == {rank: dict.fromkeys(SENT, 1000.0 + rank) for rank in range(40)}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"peak_tflops": 0}, r"extensions.observe.peak_tflops = 0\S*: must be above 0"),
        ({"peak_tflops": "much"}, r"peak_tflops"),
        ({"peek": 1}, r"peek"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], says: str, work_folder: Path) -> None:
    with pytest.raises((ConfigError, StrategyError), match=says):
        train(load_config(None, OBSERVED | {"extensions.observe": options, "out": "run"}))


def test_an_option_that_is_left_out_is_no_error() -> None:
    assert Observe().peak_tflops is None
