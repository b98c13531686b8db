"""``trials.jsonl``: what was measured is found again, also where its writer was killed in the
middle of a line.
"""

from __future__ import annotations

from pathlib import Path

from distcore_workbench.planning.available import machine_limits
from distcore_workbench.tuning.outcome import Outcome
from distcore_workbench.tuning.record import FILE, Trial, open_record

JOB = {"lr": 0.1, "optimizer.betas": (0.9, 0.99)}
FIRST, SECOND = (
    Trial(
        kind="screen",
        setting={"nproc": number},
        number=0,
        steps=8,
        outcome=Outcome(
            result="ok", seconds=1.5, speed=9.0, peak=7, losses=(0.5, 0.25), norms=(1.0,)
        ),
    )
    for number in (1, 2)
)


def test_trials_are_found_again_and_a_line_that_was_cut_off_is_measured_again(
    tmp_path: Path,
) -> None:
    record = open_record(tmp_path / "t", JOB)
    record.add(FIRST)
    record.add(SECOND)
    file = tmp_path / "t" / FILE
    file.write_text(file.read_text()[:-20])
    again = open_record(tmp_path / "t", JOB)
    assert again.trials == [FIRST]
    assert again.find("screen", {"nproc": 1}, 0) == FIRST
    assert again.find("final", {"nproc": 1}, 0) is None
    again.add(SECOND)
    assert open_record(tmp_path / "t", JOB).trials == [FIRST, SECOND]


def test_the_smallest_limit_of_the_cgroups_above_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/one\n")
    for folder, text in (("jobs", f"{2**30}\n"), ("jobs/one", "max\n")):
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / folder / "memory.max").write_text(text)
    assert min(machine_limits(tmp_path)) == 2**30
