"""A run speaks by itself where silence has surprised people; it is called as they call it,
by a command line.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from user_file import task_file

from distcore import RunConfig, dump_config
from distcore.cli.main import main
from distcore.files import lock_shared

pytestmark = [pytest.mark.needs("distcore-tasks", "distcore-workbench"), pytest.mark.programs]
TINY = "--model bert-tiny --max-seq-len 16 --device cpu --strategy single"
JOB = f"train --data rows.json {TINY}"


def call(command: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run one command; return its exit code, and what it printed to stdout and to stderr."""
    code = main(command.split())
    return code, *capfd.readouterr()


@pytest.fixture
def trained(work_folder: Path, capfd: pytest.CaptureFixture[str]) -> Path:
    """The folder of a complete run of two steps, of one epoch each."""
    assert main([*JOB.split(), "--global-batch-size", "36", "--epochs", "2", "--out", "run"]) == 0
    capfd.readouterr()
    return work_folder / "run"


@pytest.mark.parametrize("more", ["", " --task causal-lm", " --max-steps 2"])
def test_resume_auto_alone_on_a_folder_that_is_not_there_is_refused(
    work_folder: Path, capfd: pytest.CaptureFixture[str], more: str
) -> None:
    code, out, err = call(f"train --out runs/typo --resume auto{more}", capfd)
    assert (code, out) == (2, "")
    assert (
        err
        == "error: --resume auto: there is no run in runs/typo; to begin one there, name --data or"
        " a config file\n"
    )
    assert not (work_folder / "runs").exists()


def test_resume_auto_with_data_or_a_config_begins_a_run(
    work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (work_folder / "job.yaml").write_text("data: rows.json\n")
    for given in ("--data rows.json", "job.yaml"):
        code, *_ = call(f"train {given} {TINY} --out runs/new --resume auto --dry-run", capfd)
        assert code == 0


def test_a_run_on_embedded_data_says_so_first_and_once(
    work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from distcore_tasks.shared.sources import say_embedded

    say_embedded.cache_clear()  # a process says it once
    code, _, err = call(
        "train --task image-classification --device cpu --max-steps 1 --out run", capfd
    )
    assert code == 0, err
    assert re.match("data: digits, which comes with distcore; --data names your own\n", err)
    assert err.count("comes with distcore") == 1


def test_test_rows_that_are_the_evaluation_rows_are_named_and_tested_once(
    work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = call(f"{JOB} --dry-run", capfd)
    assert "# rows: 36 to train on, 4 to evaluate on, the same to test on\n" in out
    code, out, err = call(f"{JOB} --max-steps 2 --out run", capfd)
    assert code == 0
    assert f"{out}{err}".count("evaluated 4 of 4") == 1
    assert out.startswith("the test rows are the evaluation rows\n")
    assert "accuracy" in out, "the report by class is still there"


def test_a_test_that_nobody_has_said_yet_is_said(
    work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number, more in enumerate(("--test-data rows.json", "--set extensions.progress=false")):
        _, out, _ = call(f"{JOB} --max-steps 2 {more} --out run-{number}", capfd)
        assert out.startswith("test at step 2: loss ")


def test_a_folder_of_a_run_that_saved_nothing_is_set_aside_once_that_has_ended(
    work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (work_folder / "run").mkdir()
    written = dump_config(RunConfig(out="run"))
    (work_folder / "run/config.yaml").write_text(written)
    held = lock_shared(work_folder / "run/config.yaml")
    assert held
    code, _, err = call(f"{JOB} --max-steps 2 --out run", capfd)
    assert code == 2
    assert (
        err
        == "error: out = 'run': holds a run without a checkpoint; choose another, or if that has"
        " ended begin it again with --resume auto\n"
    )
    held.close()
    code, _, err = call(f"{JOB} --max-steps 2 --out run", capfd)
    assert code == 0
    assert "out = 'run': a run that ended without a checkpoint is now run.old-1\n" in err
    assert (work_folder / "run.old-1/config.yaml").read_text() == written
    assert (work_folder / "run/checkpoints").exists()


@pytest.mark.parametrize("more", ["", " --resume auto"])
@pytest.mark.parametrize("out", ["mine", "."])
def test_a_folder_with_a_config_of_the_user_s_own_is_not_taken(
    work_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    out: str,
    more: str,
) -> None:
    (work_folder / "mine").mkdir()
    (work_folder / "mine/config.yaml").write_text("lr: 0.1\n")
    monkeypatch.chdir(work_folder / "mine" if out == "." else work_folder)
    code, _, err = call(
        f"train {TINY} --data {work_folder}/rows.json --max-steps 2 --out {out}{more}", capfd
    )
    assert (code, err) == (
        2,
        f"error: out = '{out}': holds a config.yaml that no run wrote; choose another folder\n",
    )
    assert os.listdir(work_folder / "mine") == ["config.yaml"]


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_a_script_is_started_again_in_the_folder_where_it_failed(work_folder: Path) -> None:
    text = task_file(
        "if '--fail' in sys.argv: raise ValueError('no')\nreturn model(batch[0])[:, 0] ** 2"
    )
    call_train = (
        "train(RunConfig(strategy='ddp', nproc=2, device='cpu', lr=0.1, max_steps=2, out='run'),"
        " Own())"
    )
    (work_folder / "own.py").write_text(f"{text}\n{call_train}\n")
    for flags, code in (["--fail"], 3), (["--fail"], 3), ([], 0):
        done = subprocess.run(
            [sys.executable, "own.py", *flags], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, done.stderr
        assert (work_folder / "run/errors").exists() == bool(code), (
            "a good run leaves no empty folder"
        )
    assert {path.name for path in work_folder.glob("run*")} == {"run", "run.old-1", "run.old-2"}
    assert "ValueError" in next((work_folder / "run.old-2/errors").glob("rank-*.txt")).read_text()


def test_a_resume_begins_a_run_that_saved_nothing_in_its_own_folder(
    work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (work_folder / "run").mkdir()
    (work_folder / "run/config.yaml").write_text(dump_config(RunConfig()))
    code, *_ = call(f"{JOB} --max-steps 2 --out run --resume auto", capfd)
    assert code == 0
    assert "max_steps: 2" in (work_folder / "run/config.yaml").read_text()


def test_a_resume_of_a_finished_run_says_that_it_trains_nothing_and_what_trains_on(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = json.loads(Path("run/report.json").read_text())
    code, out, err = call("train --out run --resume auto", capfd)
    assert code == 0
    assert (
        json.loads(Path("run/report.json").read_text())["samples_per_second"]
        == report["samples_per_second"]
        > 0
    )
    already = "the run is already at step 2, and --epochs 2 is not beyond it"
    assert (
        f"{already}: nothing is trained; to go on, raise --epochs and add --resume-changed epochs\n"
        in err
    )
    assert out.startswith("test at step 2: ")
    trained_by = Path("run/config.yaml").read_text()
    code, _, err = call(
        "train --out run --resume auto --max-steps 1 --resume-changed max_steps", capfd
    )
    assert code == 0
    assert "already at step 2, and --max-steps 1 is not beyond it" in err
    assert Path("run/config.yaml").read_text() == trained_by
    code, _, err = call("train --out run --resume auto --epochs 3 --resume-changed epochs", capfd)
    assert code == 0
    assert "step 3/3" in err


@pytest.mark.parametrize(("flag", "steps"), [("--epochs 3", 3), ("--max-steps 4", 4)])
def test_a_refusal_to_train_on_names_the_flag_that_was_typed(
    trained: Path, capfd: pytest.CaptureFixture[str], flag: str, steps: int
) -> None:
    code, _, err = call(f"train --out run --resume auto {flag}", capfd)
    key = flag.split()[0][2:].replace("-", "_")
    assert code == 2
    assert f"the run was --epochs 2 and is {flag} (2 and {steps} steps): " in err
    assert err.endswith(f"resume with --epochs 2, or accept that with --resume-changed {key}\n")
    assert "total_steps" not in err


@pytest.mark.parametrize(
    "command",
    [
        "eval run --task causal-lm",
        "predict run --data rows.json --out p.jsonl --task causal-lm",
        "checkpoint export run --to model --task causal-lm",
    ],
)
def test_a_task_that_is_not_that_of_the_run_is_named_beside_it(
    trained: Path, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    code, _, err = call(command, capfd)
    assert code == 2
    assert (
        err.splitlines()[-1] == "error: --task causal-lm: the run is of task 'text-classification'"
    )


@pytest.mark.parametrize("ranks", ["", " --strategy ddp --nproc 2"])
def test_a_file_system_that_takes_no_folders_names_the_flag(
    work_folder: Path, capfd: pytest.CaptureFixture[str], ranks: str
) -> None:
    if not Path("/proc/self").is_dir():
        pytest.skip("there is no /proc, on which nothing can be made")
    code, _, err = call(f"{JOB} --max-steps 2{ranks} --out /proc/run", capfd)
    assert code == 2
    assert re.fullmatch(
        r"error: --out /proc/run: cannot be created: /proc: .+", err.splitlines()[-1]
    )


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", ["--strategy single", "--strategy ddp --nproc 2"])
def test_ctrl_c_before_the_first_checkpoint_says_that_nothing_was_saved(
    work_folder: Path, ranks: str
) -> None:
    (work_folder / "slow.py").write_text(SLOW)
    command = [
        sys.executable,
        "-m",
        "distcore",
        *f"train --task slow.py:Own {ranks} --lr 0.1 --out run".split(),
    ]
    with subprocess.Popen(
        command, cwd=work_folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as job:
        assert job.stderr is not None
        for line in job.stderr:
            if "building" in line:
                break
        os.killpg(job.pid, signal.SIGINT)
        said = job.stderr.read().splitlines()
    assert job.returncode == 130
    assert re.fullmatch(
        "(interrupted|stopped); nothing was saved: run has no checkpoint yet", said[-1]
    )


SLOW = task_file("""
print("building", file=sys.stderr, flush=True)
time.sleep(60)
return (model(batch[0]) - batch[1]).square().sum(1)
""")


@pytest.mark.programs  # as long as one
def test_a_run_that_is_no_better_than_the_majority_says_so_and_why_that_may_be(
    work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = (
        "no better than always guessing the largest class: trained on 36 rows from random weights;"
        " what may help: more rows, longer training or a higher --lr, or --model with pretrained"
        " weights\n"
    )
    code, out, _ = call(f"{JOB} --lr 1e-9 --max-steps 1 --out run", capfd)
    assert code == 0
    assert said in out
    assert said in call("eval run", capfd)[1]
    code, _, err = call(f"{JOB} --lr 1e30 --max-steps 3 --out diverged", capfd)
    assert code == 3
    assert (
        "the loss is not finite since step 2; no checkpoint was saved before; try a lower --lr"
        in err
    )
    assert "diverged: holds no checkpoint" in call("eval diverged", capfd)[2]
    _, out, _ = call(f"{JOB} --lr 1e-3 --max-steps 40 --out better", capfd)
    assert (
        json.loads((work_folder / "better/report.json").read_text())["evaluation"]["accuracy"] == 1
    )
    assert "largest class" not in out


@pytest.mark.needs("distcore-ddp")
@pytest.mark.ranks
def test_a_port_that_is_not_used_is_named(
    work_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29501")
    code, _, err = call(f"{JOB} --max-steps 1 --strategy ddp --nproc 2 --out run", capfd)
    assert code == 0
    assert (
        err.count(
            "MASTER_PORT = 29501: is not used; ranks on this machine meet at a port that is free\n"
        )
        == 1
    )


def test_files_of_which_one_would_win_are_refused(
    work_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "error: --data: given 2 times; several files are one value: a.csv,b.csv\n"
    assert call("train --data a.csv --data=b.csv", capfd) == (2, "", said)
    assert call("eval run --data a.csv --data b.csv", capfd) == (2, "", said)
    code, *_ = call(f"{JOB} --data rows.json --model bert-mini --model bert-tiny --dry-run", capfd)
    assert code == 0
