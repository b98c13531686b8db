"""``distcore train`` with a launcher: what the dry run prints, what is refused, and
a launcher from elsewhere.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from work_folder import install

from distcore import registry
from distcore.cli.launcher_flags import FLAGS, flags_that_start
from distcore.cli.main import command_parser, main
from distcore.hints import how_to_get
from distcore.launchers import Command, LaunchPlan, LaunchSpec, run_command, train_command


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.needs("distcore-clusters")
def test_a_dry_run_prints_the_command_without_the_flags_of_starting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = (
        "--launcher torchrun --nproc 2 --env A=b --lr 0.1 --log-dir logs --set clip.norm=2"
        " --dry-run"
    )
    assert main(["train", *flags.split()]) == 0
    printed = capsys.readouterr().out
    variables = f"TORCH_CPP_LOG_LEVEL=ERROR A=b DISTCORE_LOG_DIR={Path.cwd()}/logs"
    assert printed.startswith(f"{variables} {sys.executable} -m distcore_clusters.agent ")
    assert printed.endswith("--module distcore train --lr 0.1 --set clip.norm=2 --set nproc=auto\n")
    assert not list(Path.cwd().iterdir())


@pytest.mark.needs("distcore-clusters")
def test_a_flag_of_starting_alone_means_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--include", "localhost:1,0", "--dry-run"]) == 0
    assert (
        capsys.readouterr().out
        == f"CUDA_VISIBLE_DEVICES=1,0 {sys.executable} -m distcore train --nproc 2\n"
    )


@pytest.mark.needs("distcore-clusters")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--launcher locl", "no launcher named 'locl' (installed: "),
        ("--launcher locl", "(did you mean 'local'?)"),
        ("--launcher local --hostfile nowhere", "--hostfile nowhere: No such file or directory"),
        (
            "--hostfile hosts --include host9",
            "--include host9: no machine 'host9' (did you mean 'h",
        ),
        ("--nodes 2", "--launcher local takes no --nodes: it starts ranks here; --launcher ssh"),
        (
            "--launcher local --nodes 3:2",
            "--nodes 3:2: expected a number of machines, N, or MIN:MAX",
        ),
        ("--env A", "--env: 'A': expected NAME=VALUE"),
        ("--launcher local --nproc 1 --env A=b --lr fast", "--lr 'fast': "),
        ("--include localhost:x", "--include localhost:x: 'x': expected numbers of slots"),
    ],
)
def test_wrong_launcher_flags_are_one_line_before_anything_starts(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("hosts").write_text("host0 slots=1\n")
    assert main(["train", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.fixture
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed beside the core."""
    every = registry.all_offers

    def own(group: str) -> list[EntryPoint]:
        return [entry for entry in every(group) if entry.dist and entry.dist.name == registry.CORE]

    monkeypatch.setattr(registry, "all_offers", own)


@pytest.mark.needs("distcore")
@pytest.mark.parametrize("name", ["kubernetes", "mpi", "ray", "slurm", "ssh", "torchrun"])
def test_a_launcher_that_is_not_installed_says_how_to_get_it(
    name: str, core_alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--launcher", f"{name}:value"]) == 2
    how = how_to_get("launchers", name)
    assert (
        capsys.readouterr().err
        == f"error: no launcher named {name!r} (installed: local). Install it with: {how}\n"
    )


@pytest.mark.needs("distcore")
def test_choosing_machines_says_how_to_get_it(
    core_alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--include", "localhost:1"]) == 2
    how = how_to_get("hosts", "hostfile")
    assert (
        capsys.readouterr().err
        == f"error: no reader of hosts named 'hostfile' (installed: none). Install it with: {how}\n"
    )


def test_the_help_lists_the_launchers_that_are_installed(core_alone: None) -> None:
    text = command_parser("train")._option_string_actions["--launcher"].help
    assert text == "launcher that starts the ranks: local"


def test_a_run_that_goes_on_is_started_by_the_flags_that_were_given() -> None:
    job = ["--data", "rows.json", "--lr", "0.1"]
    given = [
        "--launcher",
        "ssh",
        "--hostfile",
        "hosts",
        "--env",
        "A=b",
        "--env",
        "C=d",
        "--bind-cores",
    ]
    assert flags_that_start([*given, *job]) == given
    assert flags_that_start([*job, "--nproc", "2"]) == ["--nproc", "2"]


def test_a_rank_is_not_started_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--launcher", "local"]) == 2
    assert "--launcher local: torchrun started this process as a rank" in capsys.readouterr().err


class Elsewhere:
    """A launcher that a stranger wrote."""

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """One command."""
        return LaunchPlan(
            commands=(Command(words=("elsewhere", spec.value, *train_command(spec))),)
        )

    def run(self, plan: LaunchPlan) -> int:
        """As its program ends."""
        return run_command(plan)


def test_a_launcher_of_another_package_is_one_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        "launchers-from-elsewhere",
        f"[distcore.launchers]\nelsewhere = {__name__}:Elsewhere\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["train", "--launcher", "elsewhere:there", "--dry-run"]) == 0
    assert (
        capsys.readouterr().out
        == f"elsewhere there {sys.executable} -m distcore train --set nproc=auto\n"
    )


@pytest.mark.needs("distcore-clusters", "distcore-tasks")
def test_a_dry_run_looks_at_the_data_that_the_user_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = (
        "--launcher slurm --nodes 2 --nproc 8 --strategy ddp --device cuda --precision bf16 --out"
        " run --dry-run"
    )
    Path("rows.csv").write_text(
        "text,label\n" + "".join(f"row {row},{row % 2}\n" for row in range(20))
    )
    for words, problem in (
        ("--data nowhere.csv", "data file nowhere.csv: no such file"),
        (
            "--data rows.csv --label-column lable",
            "data file rows.csv: no column 'lable' (did you mean 'label'?)",
        ),
        ("--data rows.csv --text-column label", "columns.text and columns.label are both 'label'"),
        ("--data rows.csv --model ./none", "model ./none: no such folder"),
    ):
        assert main(["train", *flags.split(), *words.split()]) == 2
        printed = capsys.readouterr()
        assert problem in printed.err
        assert not printed.out
    assert main(["train", *flags.split(), "--data", "rows.csv"]) == 0
    assert "srun" in capsys.readouterr().out


@pytest.mark.needs("distcore-workbench")
def test_every_flag_of_starting_is_in_the_help_and_only_train_has_it() -> None:
    known = command_parser("train")._option_string_actions
    assert not [name for name in FLAGS if not known[name].help]
    assert "--hostfile" not in command_parser("compare")._option_string_actions
