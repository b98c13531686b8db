"""Figures in the prose that the code knows, and names in backticks, are those of the code."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from distcore import registry
from distcore.config import RunConfig
from distcore.errors import StrategyError
from distcore.plugin.options import Option, options_of
from distcore.plugin.strategy.capabilities import SPEC_VERSION
from distcore.plugin.strategy.hooks import EVENTS, OPERATIONS
from distcore.testing.register import all_cases

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
NUMBER = rf"(?P<number>\d[\d,]*|{'|'.join(WORDS)})"
SUFFIXES = "py|md|yaml|yml|toml|json|jsonl|txt"
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def counted(pattern: str) -> re.Pattern[str]:
    """Patterns that claim a figure: ``#`` stands for the number."""
    return re.compile(pattern.replace("#", NUMBER).replace(" ", r"\s+"), re.I)


def _laws() -> int:
    """Measured for strategies, and the one that the core keeps alone."""
    return len({case.law for case in all_cases().values()}) + 1


def _settings() -> int:
    return len(json.loads((ROOT / "docs/any-to-any.json").read_text()))


def _folders(pattern: str) -> int:
    return len(list(ROOT.glob(pattern)))


def _project(folder: Path = ROOT) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


def _extras() -> set[str]:
    return set(_project()["optional-dependencies"])


ALL = r"\b(?:the|has|have|are|all|comes with)"
"""Words before a figure that claim to count all of a kind."""


FIGURES: list[tuple[str, Callable[[], int]]] = [
    (r"\b# laws\b", _laws),
    (r"pairs of # settings\b", _settings),
    (r"\b# settings\b[^.]*\bpairs\b", _settings),
    (r"\b# ordered pairs\b", lambda: _settings() ** 2),
    (r"\b# rooms\b", lambda: _folders("core/distcore/*/__init__.py")),
    (rf"{ALL} # tasks\b", lambda: _folders("plugins/tasks/distcore_tasks/*/task.py")),
    (
        r"\b# (?:tasks )?\[?come with distcore\b",
        lambda: _folders("plugins/tasks/distcore_tasks/*/task.py"),
    ),
    *[
        (rf"{ALL} # {kind}\b", partial(len, registry.entries(kind)))
        for kind in ("strategies", "optimizers", "launchers")
    ],
    (rf"{ALL} # extras\b", lambda: len(_extras())),
    (rf"{ALL} # hooks\b", lambda: len(OPERATIONS) + len(EVENTS)),
    (rf"{ALL} # operations\b", lambda: len(OPERATIONS)),
    (rf"{ALL} # events\b", lambda: len(EVENTS)),
    (r"depends on the first #\b", lambda: len(_project()["dependencies"])),
    (r"\bneeds? Python 3\.#", lambda: int(_project()["requires-python"].rpartition(".")[2])),
    # and their data
    (r"\b# (?:published )?algorithms\b", lambda: _folders("examples/own-steps/*.py") - 1),
    (r"hook[ -]specs?,? version #\b", lambda: SPEC_VERSION),
    (r"`SPEC_VERSION` is #\b", lambda: SPEC_VERSION),
    (r"\bspec_version=#\b", lambda: SPEC_VERSION),
]
HISTORY = {"compatibility.md"}
"""Pages that compare this version of a contract with the one before."""


def number(text: str) -> int:
    return WORDS.index(text.lower()) if text.lower() in WORDS else int(text.replace(",", ""))


def wrong_figures(text: str) -> list[str]:
    """The claims of ``text`` that the code contradicts."""
    claims = (
        (claim, count) for pattern, count in FIGURES for claim in counted(pattern).finditer(text)
    )
    return [claim[0] for claim, count in claims if number(claim["number"]) != count()]


@cache
def sources() -> str:
    """Everything that names things: code, build files, and files that others read."""
    kinds = ("*.py", "*.toml", "*.txt", "*.c", "*.cpp", "*.yaml", "*.html", "Makefile")
    folders = [
        ROOT / name
        for name in (
            "core",
            "hints",
            "plugins",
            "tests",
            "benchmarks",
            "tools",
            "examples",
            "docs/_ext",
        )
    ]
    files = [file for folder in folders for kind in kinds for file in folder.rglob(kind)]
    return "\n".join(
        file.read_text(errors="ignore")
        for file in [*files, ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "conftest.py"]
        if file != Path(__file__)
    )


@cache
def words() -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", sources()))


@cache
def flags() -> set[str]:
    """Flags as the sources write them, and those that are made of the names of options."""
    written = set(re.findall(r"--[a-z][\w-]+", sources()))
    options = {option.name for group in ("tasks", "strategies") for option in _options(group)}
    nested = {name.partition(".")[2] for name in options if "." in name}
    nested |= {
        f"{name.partition('.')[2]}_column" for name in options if name.startswith("columns.")
    }
    return written | {f"--{name.replace('_', '-')}" for name in options | nested}


def _options(group: str) -> Iterator[Option]:
    for name in registry.entries(group):
        try:
            yield from options_of(registry.load(group, name))
        except StrategyError:  # a backend that is not built here
            continue


@cache
def files() -> set[str]:
    """Paths of this repository, and the names of files in it."""
    skipped = {".venv", ".git", "build", "dist", "runs", "__pycache__"}
    paths = [path for path in ROOT.rglob("*") if not skipped & set(path.relative_to(ROOT).parts)]
    return {str(path.relative_to(ROOT)) for path in paths} | {path.name for path in paths}


def config_keys(model: type[BaseModel] = RunConfig, above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{above}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from config_keys(field.annotation, f"{above}{name}.")


KEYS = set(config_keys())
TREES = {key.partition(".")[0] for key in KEYS if "." in key} - {"optimizer", "schedule"}
"""Trees of the config whose keys are all its own: the others have options
of a plugin beside them.
"""
COMMANDS = {
    *registry.entries("commands"),
    *(file.stem for file in ROOT.glob("core/distcore/cli/commands/*.py")),
}
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
FOREIGN = {
    # Of other people's programs and libraries.
    "--index-url",
    "--find-links",
    "--num_gpus",
    "--num_processes",
    "--deepspeed_config",
    "--per_device_train_batch_size",
    "--gpus-per-task",
    "--nnodes",
    "--model_name_or_path",
    "--task_name",
    "--dataset_name",
    "--dataset_config_name",
    "--train_file",
    "--validation_file",
    "--test_file",
    "--max_train_samples",
    "--logdir",
    "--backend-store-uri",
    "--use_deepspeed",
    "zero_to_fp32.py",
    "base_model_tp_plan",
    "center_rewards_coefficient",
    # Of the reader.
    "--strategy mine",
    # Made of another name: of a file, of a rank's number, of an option of the task that
    # the page shows.
    "predicted.jsonl.part.json",
    "trace-rankN.json",
    "--width",
}


def unknown_names(text: str) -> Iterator[str]:
    """Names in backticks in ``text`` that are nowhere in the repository."""
    blocks = "\n".join(re.findall(r"```.*?```", text, re.S))
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    for span in SPAN.findall(prose):
        yield from (name for name in _names(span) if not _is_known(name, blocks))
    for extra in re.findall(r"\bextra `([\w-]+)`|distcore\[([\w-]+)\]", prose):
        if "".join(extra) not in _extras():
            yield f"extra {''.join(extra)}"
    said = re.search(r"The extras are\s+([^.]+)\.", prose)
    if said:
        yield from (
            f"extra {name}" for name in _extras().symmetric_difference(SPAN.findall(said[1]))
        )


def _names(span: str) -> Iterator[str]:
    """The flags, commands, keys, files and identifiers of a piece of code."""
    yield from re.findall(r"(?<![\w-])--[a-z][\w-]+", span)
    yield from re.findall(r"^(?:distcore|make) [a-z][\w-]+", span)
    yield from re.findall(r"--(?:strategy|task|optimizer|launcher) [a-z][\w-]*$", span)
    yield from re.findall(r"^(?:distcore-|plugins/)[a-z]+$", span)
    yield from re.findall(r"--set ([a-z]\w*(?:\.\w+)*)=", span)
    if re.fullmatch(rf"[\w./-]+\.(?:{SUFFIXES})", span) or re.fullmatch(
        r"[a-z]\w*(?:\.\w+)+|[a-z]+(?:_[a-z0-9]+)+|[A-Z][a-z]+(?:[A-Z][a-z]+)+", span
    ):
        yield span


def _is_known(name: str, blocks: str) -> bool:
    # the page shows it, or it is a placeholder
    if name in blocks or name in FOREIGN or re.search("[A-Z]{3}", name):
        return True
    if " " in name and name.startswith("--"):
        flag, value = name.removeprefix("--").split()
        return value in registry.entries({"strategy": "strategies"}.get(flag, f"{flag}s"))
    if name.startswith("--"):
        return name in flags() or name.replace("--no-", "--") in flags()
    if name.startswith(("distcore-", "plugins/")):
        return (ROOT / "plugins" / re.split("[-/]", name)[1]).is_dir() or name == "distcore-core"
    if name.startswith("distcore "):
        return name.split()[1] in COMMANDS
    if name.startswith("make "):
        return name.split()[1] in TARGETS
    if re.fullmatch(rf"[\w./-]+\.(?:{SUFFIXES})", name):
        return name in sources() or any(f"/{file}".endswith(f"/{name}") for file in files())
    tree, _, key = name.partition(".")
    if key and tree in TREES:
        return name in KEYS or name in sources()
    return all(part in words() or part.isdigit() for part in name.split("."))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_figures_of_a_page_are_those_of_the_code(page: Path) -> None:
    if page.name not in HISTORY:
        assert not wrong_figures(page.read_text())


@pytest.mark.parametrize(
    "page", [*ROOT.glob("plugins/*/README.md")], ids=lambda page: page.parent.name
)
def test_a_plugin_counts_the_entry_points_that_it_has(page: Path) -> None:
    claim = counted(
        r"# (?P<kind>strategies|tasks|commands|optimizers|launchers|extensions) (?:for|of)"
        r" \[distcore"
    )
    groups = _project(page.parent).get("entry-points", {})
    for said in claim.finditer(page.read_text()):
        assert number(said["number"]) == len(groups[f"distcore.{said['kind'].lower()}"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_names_of_a_page_are_in_the_repository(page: Path) -> None:
    text = page.read_text()
    if page.name == "coming-from.md":  # the first column has the names of others
        text = re.sub(r"^\| .+? \|", "|", text, flags=re.M)
    assert not list(unknown_names(text))


@pytest.mark.parametrize(
    "claim",
    [
        "all ordered pairs of 25 settings, which are `single` on one rank",
        "all 625 ordered pairs of them",
        "The core is cut into sixteen rooms",
        "Ten laws say what that means",
        "`SPEC_VERSION` is 2",
        "Capabilities(spec_version=1)",
        "Six\n[come with distcore](../plugins/tasks/README.md)",
        "distcore comes with nine strategies",
        "all five optimizers",
        "there are eight launchers",
        "A strategy has sixteen hooks",
        "depends on the first three, and has extras",
        "Both need Python 3.10",
        "Five published algorithms",
    ],
)
def test_a_stale_figure_is_noticed(claim: str) -> None:
    assert wrong_figures(claim)


@pytest.mark.parametrize(
    "claim",
    [
        "The extras are `ddp` and `token-classification`.",
        "by the extra `token-classification`",
        "`distcore[token-classification]`",
        "a list in `config/aliases_of_old.py`",
        "`distcore compares` shows it",
        "`make wheels` builds them",
        "`--strategies-file` names one",
        "`checkpoints.best_metric` takes any",
        "the hook `lay_out_all_gradients`",
        "`distcore.plugin.abilities_of_tasks`",
        "`--strategy megatron`",
        "`--set loader.workers_of_all=3`",
        "`distcore-profilers` has it",
        "the folder `plugins/jax`",
        "`--gradient-accumulation-size`",
    ],
)
def test_a_stale_name_is_noticed(claim: str) -> None:
    assert list(unknown_names(claim))


def test_random_numbers_follow_the_data_shard() -> None:
    """No page may say that the rank seeds them: ranks that share rows draw the same numbers."""
    seeding = (ROOT / "core/distcore/engine/seeding.py").read_text()
    assert re.search(r"seed[^\n]*\n?[^\n]*\bshard\b", seeding)
    stale = [
        page.name
        for page in PAGES
        if re.search(r"seed,\s+step\s+and\s+rank|each\s+step\s+and\s+rank", page.read_text())
    ]
    assert not stale
