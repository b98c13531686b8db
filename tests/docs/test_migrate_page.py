"""Every flag, key and hook that the page offers instead of something of the Trainer is there,
and takes that value.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from distcore.cli.main import main
from distcore.plugin.strategy.hooks import EVENTS, OPERATIONS

pytestmark = pytest.mark.programs  # a command for each row of the page

PAGE = (Path(__file__).parents[2] / "docs/coming-from.md").read_text()
ARGUMENTS, CALLBACKS = (
    PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in ("Arguments", "Callbacks")
)
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", ARGUMENTS, re.M)[1:]
OFFERED = [code for _, answer in ROWS for code in re.findall(r"`(--[^`]+)`", answer)]


@pytest.mark.parametrize("flags", OFFERED)
def test_the_commands_of_the_page_would_train(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"text": f"{label} {number}", "label": label}
        for number in range(40)
        for label in ("good", "bad")
    ]
    (tmp_path / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}'
    )
    (tmp_path / "my_accelerate.yaml").write_text(
        'distributed_type: "NO"\nnum_processes: 1\nuse_cpu: true\n'
    )
    given = ["--data", "reviews.jsonl", "--model", "bert-tiny", *shlex.split(flags)]
    assert main(["train", *given, "--dry-run"]) == 0, capsys.readouterr().err


def test_every_argument_has_an_answer() -> None:
    assert len(ROWS) > 20  # distcore migrate answers for all others
    assert all(re.search(r"`--|[Nn]ot there|Not set|AdamW", answer) for _, answer in ROWS)


def test_the_hooks_of_the_page_are_hooks() -> None:
    hooks = re.findall(r"^\| .+ \| (?:Wrap[^`]+)?(`.+?`) (?:\(.*\) )?\|$", CALLBACKS, re.M)
    named = [name for answer in hooks for name in re.findall(r"`(\w+)`", answer)]
    assert {"on_run_start", "on_checkpoint", "train_step"} <= set(named) <= {*EVENTS, *OPERATIONS}
