"""The garbage collector rests while a command imports, and works as usual while it trains."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from distcore.garbage import RARE, USUAL, spare_modules

WATCH = """
import gc
import sys
from distcore import hookimpl

class Watch:
    @hookimpl(wrapper=True)
    def setup(self):
        print("setup", gc.get_threshold() != self.usual, gc.get_freeze_count() > 0)
        return (yield)

    @hookimpl
    def on_step_end(self):
        print("step", gc.get_threshold() != self.usual, gc.get_freeze_count() > 0)
        print("step with torch's compiler:", "torch._dynamo.eval_frame" in sys.modules)

    usual = USUAL
"""


@pytest.mark.programs
@pytest.mark.needs("distcore-tasks")
def test_a_command_imports_with_rare_collections_and_trains_with_the_usual_ones(work_folder: Path) -> None:
    (work_folder / "watch.py").write_text(WATCH.replace("USUAL", str(USUAL)))
    job = ["--data", "rows.json", "--model", "bert-tiny", "--max-steps", "1", "--out", "run", "--device", "cpu"]
    command = [sys.executable, "-m", "distcore", "train", *job, "--set", "extensions.watch.py:Watch=true"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heard = [line for line in done.stdout.splitlines() if line.startswith(("setup ", "step "))]
    assert heard == ["setup True False", "step False True", "step with torch's compiler: False"]


def test_a_process_that_is_no_command_keeps_its_collector() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with spare_modules():
        assert (gc.get_threshold(), gc.get_freeze_count()) == before
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_collections_are_the_usual_ones_behind_the_spared_modules() -> None:
    try:
        gc.set_threshold(*RARE)
        with spare_modules():
            assert gc.get_freeze_count()
        assert gc.get_threshold() == USUAL
    finally:
        gc.unfreeze()
        gc.set_threshold(*USUAL)
