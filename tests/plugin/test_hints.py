"""Hints at the end of error lines: what the distributions tell, and lines without them."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from work_folder import install

from distcore import hints, registry
from distcore.cli.commands import command_module
from distcore.cli.main import main
from distcore.errors import ConfigError, StrategyError
from distcore.model.optim import is_plugin, optimizer_class
from distcore.rank_environment import join

ROOT = Path(__file__).parents[2]
UNTYPED = {"checkpoints", "default_extensions", "default_task", "kits", "suites"}
"""Groups whose plugins no user names."""


def shipped(plugin: Path) -> dict[str, list[str]]:
    """The names of a plugin's entry points, by group."""
    project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
    groups = {
        group.removeprefix("distcore."): sorted(entries)
        for group, entries in project.get("entry-points", {}).items()
        if group.startswith("distcore.")
    }
    return {group: names for group, names in groups.items() if group not in UNTYPED}


def test_the_hints_list_the_plugins_of_each_distribution() -> None:
    provider = pytest.importorskip("distcore_hints")
    folders = sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml"))
    assert {f"distcore-{folder.name}": shipped(folder) for folder in folders} == provider.SHIPPED


@pytest.fixture
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed but the core, which has no hints of its own."""
    every = registry.all_offers

    def of_the_core(group: str) -> list[EntryPoint]:
        return [entry for entry in every(group) if entry.dist and entry.dist.name == registry.CORE]

    monkeypatch.setattr(registry, "all_offers", of_the_core)
    monkeypatch.setattr(hints, "_providers", list)


@pytest.mark.parametrize(
    ("group", "name", "line"),
    [
        ("strategies", "fsdp", "no strategy named 'fsdp' (installed: single)"),
        (
            "strategies",
            "singel",
            "no strategy named 'singel' (installed: single) (did you mean 'single'?)",
        ),
        ("launchers", "slurm", "no launcher named 'slurm' (installed: local)"),
        (
            "tasks",
            "text-classification",
            "no task named 'text-classification' (installed: none); train your own: --task"
            " file.py:Class",
        ),
    ],
)
def test_the_core_alone_lists_what_is_installed(
    no_provider: None, group: str, name: str, line: str
) -> None:
    with pytest.raises(StrategyError) as error:
        registry.load(group, name)
    assert str(error.value) == line


def test_the_core_alone_asks_for_a_task_where_none_is_named(no_provider: None) -> None:
    with pytest.raises(
        StrategyError, match=r"has a default one: name one by --task NAME or --task file\.py:Class$"
    ):
        registry.default_task()


def test_the_core_alone_knows_its_own_commands_and_optimizers(no_provider: None) -> None:
    with pytest.raises(ConfigError, match=r"^no command named 'compare' .*commands: train, "):
        command_module("compare")
    assert is_plugin("adamw")
    assert not is_plugin("lion")


def test_the_core_alone_refuses_ranks_that_it_cannot_read(no_provider: None) -> None:
    with pytest.raises(ConfigError, match=r"^SLURM_STEP_NUM_TASKS=2: .* ranks of srun$"):
        join({"SLURM_STEP_NUM_TASKS": "2"})


def test_the_core_alone_corrects_a_slip_in_a_flag(
    no_provider: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["strategies", "--jsom"]) == 2
    assert "unknown flag '--jsom' (did you mean '--json'?)" in capsys.readouterr().err


def test_a_stranger_provides_hints_and_a_broken_provider_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "galaxy_hints.py").write_text(
        "FLAGS, KEYS = {'--stars': '--nproc, one star each'}, {}\n"
        "SHIPPED = {'distcore-galaxy': {'strategies': ['galaxy']}}\n"
        "def how_to_install(distribution): return f'fetch {distribution}'\n"
    )
    install(tmp_path, "galaxy-hints", "[distcore.hints]\ngalaxy = galaxy_hints\n")
    install(tmp_path, "broken-hints", "[distcore.hints]\nbroken = no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hints, "_providers", hints._providers.__wrapped__)
    with pytest.raises(StrategyError, match=r"'galaxy' .*Install it with: fetch distcore-galaxy$"):
        registry.load("strategies", "galaxy")
    assert hints.hint_from_other_libraries("--stars", ["--nproc"]) == (
        " (here it is --nproc, one star each)"
    )


def test_a_start_loads_no_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[SimpleNamespace]:
        raise AssertionError("no error is being written")

    monkeypatch.setattr(hints, "_providers", fail)
    registry.load("strategies", "single")
    assert is_plugin("adamw")
    optimizer_class("adamw")
    with pytest.raises(AssertionError, match="no error is being written"):
        registry.load("strategies", "galaxy")
