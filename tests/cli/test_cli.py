"""The command line: what it imports, what its flags mean, what it prints."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic_core import PydanticUndefined

from distcore import DeprecatedWarning
from distcore.cli.commands import summaries
from distcore.cli.commands.train import config_of
from distcore.cli.flags import FLAGS, Flag
from distcore.cli.main import main
from distcore.cli.task_flags import task_flags
from distcore.config import RunConfig, load_config
from distcore.config.keys import RENAMED
from distcore.errors import ConfigError
from distcore.hints import nearest

HEAVY = ("torch", "transformers", "pydantic", "pluggy", "rich", "numpy", "yaml")
SET_ONLY = {
    "strategy_options",
    "optimizer",
    "schedule",
    "clip",
    "gradient_checkpointing",
    "checkpoints",
    "extensions",
    "data_guard_steps",
    "timeout",
    "task_options",
    "dropout_masks",
    "eval_at_epoch_end",
    "tf32",
    "threads",
}
HINTS = tomllib.loads(
    (Path(__file__).parents[2] / "hints/distcore_hints/hints.toml").read_text(encoding="utf-8")
)
LOOPBACK = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
NOT_A_CONSTANT = {
    "exact",
    "max_steps",
    "out",
    "resume",
    "resume_changed",
    "preset",
    "freeze",
    "lora.rank",
    "ema.decay",
    "micro_batch_tokens",
}


def field_of(flag: Flag) -> tuple[object, object]:
    """Default and annotation of the config field that a flag sets."""
    model: Any = RunConfig
    *parents, leaf = RENAMED.get(flag.key, flag.key).split(".")
    for parent in parents:
        model = model.model_fields[parent].annotation
    field = model.model_fields[leaf]
    return field.default, field.annotation


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in ("train", "predict", "eval")),
        pytest.param(["compare", "--help"], marks=pytest.mark.needs("distcore-workbench")),
    ],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    # the options of the task are types of it
    of_task = {"pydantic"} if arguments[0] in ("train", "compare") else set()
    code = (
        "import sys; from distcore.cli.main import main\ntry: main(sys.argv[1:])\nexcept"
        f" SystemExit: pass\nprint([name for name in {HEAVY} if name in sys.modules and name not in"
        f" {of_task}], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"
    assert "distcore" in done.stdout


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_a_flag_without_a_command_imports_no_plugin(argument: str) -> None:
    code = (
        "import sys; from distcore.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith('distcore_')], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, argument], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("train --nproc 0", "--nproc '0': must be greater than or equal to 1 or 'auto'"),
        ("train --lr -1", "--lr '-1': must be greater than 0 or 'auto'"),
        ("train --strategy nowhere", "no strategy named 'nowhere' (installed: "),
        ("train strategy.yaml", "no strategy named 'nowhere' (installed: "),
        ("eval runs/a --strategy nowhere", "no strategy named 'nowhere' (installed: "),
        ("train --task nowhere", "no task named 'nowhere'"),
        ("train --schedule cosin", "schedule.name = 'cosin': no such schedule (did you mean 'cos"),
        ("train --optimizer adamm", "optimizer.name = 'adamm': strategy 'single' takes ada"),
        ("train --optimizer mine.py:Mine", "optimizer 'mine.py:Mine': no file mine.py"),
        ("train --data rows.jsonl", "data file rows.jsonl: no such file\n"),
        ("train --data strategy.jsonl", "data file strategy.jsonl: no such file"),
        ("train --eval-data a=rows.csv", "evaluation set a: data file rows.csv: no such file\n"),
        ("check --strategy single --nproc 0", "--nproc: 0: expected a number of ranks, 1 or more"),
        ("predict runs/a --data x --out y --nproc 0", "--nproc: 0: expected a number of ranks"),
    ],
)
@pytest.mark.needs("distcore-tasks")
def test_a_slip_is_told_without_torch(words: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "strategy.yaml").write_text("strategy: nowhere\n")
    code = (
        "import sys; from distcore.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "print(code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith(f"error: {line}")


@pytest.mark.parametrize(
    "arguments",
    [["train", "--help", "all", "--task=text-classification"], ["tasks", "text-classification"]],
    ids=" ".join,
)
@pytest.mark.needs("distcore-tasks", "distcore-workbench")
def test_a_task_is_described_without_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from distcore.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    # what a test's own process has of a terminal is no matter
    wide = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=wide,
    )
    assert done.stderr.strip() == "False"
    assert "loss↓ accuracy↑" in done.stdout
    of_help, of_table = (
        r"--max-seq-len N +Length of a row in tokens",
        r"max_seq_len +int ≥ 4 +128 +Length of a row",
    )
    assert re.search(of_help if "--help" in arguments else of_table, done.stdout)


@pytest.mark.needs("distcore-tasks")
def test_help_of_a_task_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--task", "text-clasification", "--help"]) == 2
    assert "did you mean 'text-classification'" in capsys.readouterr().err


def test_distcore_without_a_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and text in out for name, text in summaries().items())


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_flag_says_the_default_and_choices_of_its_field(flag: Flag) -> None:
    default, annotation = field_of(flag)
    assert default is not PydanticUndefined
    if flag.key in NOT_A_CONSTANT:
        assert default is None
    else:
        assert flag.default == str(default)
    if "|" in flag.takes and flag.name != "--resume":
        assert flag.takes.split("|") == list(get_args(annotation))


@pytest.mark.parametrize("theirs", HINTS["flags"])
@pytest.mark.needs("distcore-tasks")
def test_a_flag_of_another_library_is_named_by_what_there_is(theirs: str) -> None:
    here, key = HINTS["flags"][theirs], HINTS["keys"].get(theirs, "")
    keys = {flag.name: flag.key for flag in (*FLAGS, *task_flags("text-classification", ()).flags)}
    assert theirs not in keys or key  # a flag of ours is there for the sake of its key
    assert set(re.findall(r"--[\w-]+", here)) <= {*keys, "--set", "--nodes"}
    flag = re.match(r"--[\w-]+", here)[0]  # type: ignore[index]
    assert key in ("", keys.get(flag), "schedule.warmup_ratio")
    if not key and flag in keys:
        assert keys[flag].removeprefix("task_options.") == flag[2:].replace("-", "_")
    for key, value in re.findall(r"--set (\S+)=(\S+)", here):
        load_config(
            None,
            {key: {"VALUE": 0.1, "N": 1, "NAME": "cosine", "true": True, "FILE": "f.json"}[value]},
        )


@pytest.mark.needs("distcore")
@pytest.mark.parametrize(
    ("key", "here"),
    [
        ("learning_rate", "lr"),
        ("batch_size", "global_batch_size"),
        ("max_grad_norm", "clip.norm"),
        ("num_workers", "loader.workers=N"),
        ("fp16", "precision='fp16'"),
        (
            "gradient_accumulation_steps",
            "micro_batch_size, which with global_batch_size says how many",
        ),
    ],
)
def test_a_key_of_another_library_is_named_by_ours(key: str, here: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"RunConfig: unknown key {key!r} (here it is {here})")
    ):
        RunConfig(**{key: 1})


@pytest.mark.parametrize(
    ("word", "meant"),
    [("dpp", "ddp"), ("dpd", "ddp"), ("dp2", "dp"), ("fsdp2", "fsdp"), ("deepspeeed", "deepspeed")],
)
def test_a_slip_of_the_keys_is_the_name_of_that_length(word: str, meant: str) -> None:
    assert (
        nearest(word, ["dp", "ddp", "fsdp", "single", "deepspeed"]) == f" (did you mean {meant!r}?)"
    )


@pytest.mark.parametrize("word", ["--beta", "--learning", "xyzzy", "--frob"])
def test_a_word_that_is_far_from_all_is_given_no_meaning(word: str) -> None:
    assert nearest(word, ["--data", "--lora", "--warmup", "--lr", "--freeze", "--seed"]) == ""


def test_every_field_has_a_flag_or_is_known_to_need_set() -> None:
    keys = {flag.key.partition(".")[0] for flag in FLAGS} - RENAMED.keys()
    assert keys | SET_ONLY == set(RunConfig.model_fields)


@pytest.mark.needs("distcore-tasks")
def test_every_flag_of_a_task_sets_an_option_of_it() -> None:
    assert {flag.key.partition(".")[0] for flag in task_flags("text-classification", ()).flags} == {
        "task_options"
    }


def test_set_overrides_flags_and_flags_override_the_file(work_folder: Path) -> None:
    (work_folder / "job.yaml").write_text("lr: 0.1\nepochs: 2\nseed: 3\n")
    given = {
        "config": "job.yaml",
        "lr": "0.2",
        "epochs": "4",
        "set": ["lr=3e-1", "optimizer.eps=1e-6"],
    }
    config = config_of(argparse.Namespace(**given))
    assert (config.lr, config.epochs, config.seed, config.optimizer.options["eps"]) == (
        0.3,
        4,
        3,
        1e-6,
    )


@pytest.mark.needs("distcore-tasks")
def test_dry_run_prints_a_config_that_trains_and_starts_nothing(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = (
        "train --data rows.json --model bert-tiny --strategy ddp --nproc 2 --global-batch-size 16"
        " --micro-batch-size 4"
    )
    command = [*job.split(), "--set", "schedule.warmup_ratio=0.4", "--out", "run", "--dry-run"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert not (work_folder / "run").exists()
    (work_folder / "dry.yaml").write_text(out)
    config = load_config("dry.yaml", {})
    assert (
        config.nproc,
        config.device in {"cpu", "cuda"},
        config.lr,
        config.schedule.warmup_steps,
    ) == (
        2,
        True,
        5e-4,
        1,
    )
    assert "auto" not in yaml.safe_load(out).values()
    assert "# micro-batches: at most 4 rows, equally many in each" in out
    assert "# rows: 36 to train on, 4 to evaluate on, the same to test on" in out
    assert "# steps: 3 per epoch, 3 in total, 16 rows each" in out
    assert "# rank 1 on" in out
    assert "first step has 2 micro-batch(es), of 4, 4 rows" in out


@pytest.mark.needs("distcore-tasks")
def test_a_dry_run_says_how_steps_are_cut_by_tokens(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = (
        "train --data rows.json --model bert-tiny --set device=cpu --global-batch-size 16 --out run"
        " --dry-run"
    )
    packed, job = job, f"{job} --padding-free off"
    with pytest.warns(DeprecatedWarning, match="'packing'"):
        assert main(job.replace("padding-free", "packing").split()) == 0
    out = capsys.readouterr().out
    config = yaml.safe_load(out)
    assert [key for key, value in config.items() if value == "auto"] == ["micro_batch_size"]
    assert (config["micro_batch_tokens"], config["loader"]["forward_tokens"]) == (4096, 96)
    assert "# micro-batches: at most 4096 tokens, padding included" in out
    assert main(packed.split()) == 0
    assert "# micro-batches: at most 4096 tokens, without padding" in capsys.readouterr().out
    assert main([*job.split(), "--micro-batch-tokens", "300", "--micro-batch-size", "8"]) == 0
    assert (
        "# micro-batches: at most 8 rows and 300 tokens, padding included"
        in capsys.readouterr().out
    )


@pytest.mark.programs
@pytest.mark.needs("distcore-tasks")
def test_train_reports_and_its_config_trains_again(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "train --data rows.json --model bert-tiny --max-steps 2 --log-every 1 --out run"
    assert main(job.split()) == 0
    out, err = capsys.readouterr()
    assert out.startswith("the test rows are the evaluation rows\n")
    assert "precision    recall" in out
    assert out.endswith("run folder: run\n")
    warning, task, rows, model, ranks, steps, *lines = err.splitlines()
    assert "classes with fewer than 3 evaluation rows" in warning
    assert task == "task:   text-classification, 2 classes"
    assert rows == "rows:   36 to train on, 4 to evaluate on, the same to test on, of rows.json"
    assert re.fullmatch(
        r"model:  bert-tiny \(BertForSequenceClassification\), [\d,]+ parameters", model
    )
    assert re.fullmatch(r"ranks:  1 rank \(single\) on \w+, in fp32", ranks)
    assert steps == "steps:  2 of 32 rows, 1 epoch"
    assert [line.partition("  ")[0] for line in lines] == ["step 1/2", "step 2/2", lines[2]]
    assert main(["train", "run/config.yaml", "--out", "again"]) == 0
    first, second = (
        (work_folder / name / "predictions.jsonl").read_text() for name in ("run", "again")
    )
    assert first == second


@pytest.mark.ranks
@pytest.mark.needs("distcore-tasks")
def test_ranks_that_a_launcher_started_join_and_the_main_one_reports(work_folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        *LOOPBACK,
        "-m",
        "distcore",
    ]
    job = (
        "train --data rows.json --model bert-tiny --strategy ddp --max-steps 1 --set device=cpu"
        " --out run"
    )
    done = subprocess.run(
        [*command, *job.split()], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder: run\n") == 1
    assert json.loads((work_folder / "run/report.json").read_text())["world_size"] == 2


@pytest.mark.needs("distcore-tasks")
def test_a_defect_is_one_line_and_a_traceback_file(
    work_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (work_folder / "mine.py").write_text(
        "from distcore import hookimpl\n"
        "class Bad:\n    @hookimpl\n    def on_run_start(self): raise ValueError('two\\nlines')\n"
    )
    job = "train --data rows.json --model bert-tiny --out run --set extensions.mine.py:Bad=true"
    assert main(job.split()) == 3
    err = capsys.readouterr().err
    assert (
        err.splitlines()[-1]
        == "error: ValueError: two lines; traceback in run/errors/traceback.txt; raised at"
        " mine.py:4"
    )
    assert "on_run_start" in Path("run/errors/traceback.txt").read_text()


@pytest.mark.needs("distcore-workbench")
def test_a_job_with_packages_that_do_not_fit_together_is_refused(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = work_folder / "site-packages/tables_that_do_not_fit.py"
    package.parent.mkdir()
    package.write_text('raise ImportError("tokens>=2 is required")\n')
    monkeypatch.syspath_prepend(package.parent)
    task = (
        "from distcore import Simple\nclass Mine(Simple):\n    def row_loss(self, model, batch):"
        " pass\n"
    )
    task += "    def model(self): pass\n    def data(self): import tables_that_do_not_fit\n"
    Path("mine.py").write_text(task)
    assert main(["train", "--task", "mine.py:Mine", "--dry-run"]) == 2
    assert (
        "pip check names those that do not fit together; ImportError: tokens>=2"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(("folder", "code"), [("site-packages", 2), ("mine", 3)])
def test_packages_that_do_not_fit_together_are_no_defect_of_ours(
    folder: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / folder / f"tables_of_{folder[:4]}.py"
    package.parent.mkdir()
    package.write_text('raise ImportError("tokens>=2 is required,\\nbut there is tokens==1")\n')
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(
        "distcore.cli.main.run", lambda *_, **__: importlib.import_module(package.stem)
    )
    assert main(["tasks"]) == code
    printed = capsys.readouterr().err.strip()
    assert "ImportError: tokens>=2 is required, but there is tokens==1; traceback in " in printed
    assert ("pip check" in printed) == (code == 2)
    assert (f"raised at {package}" in printed) == (code == 3)


def test_a_local_rank_before_the_command_is_taken_from_launchers_that_put_it_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "")  # so that what is set below goes with the test
    monkeypatch.delenv("LOCAL_RANK")
    assert main(["--local_rank=1", "strategies", "--json"]) == 0
    assert os.environ["LOCAL_RANK"] == "1"
