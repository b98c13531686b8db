"""Names in backticks on a page are those of the code: flags, commands, keys, files, functions."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from distcore import registry
from distcore.config import RunConfig
from distcore.errors import StrategyError
from distcore.plugin.options import Option, options_of

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
SUFFIXES = "py|md|yaml|yml|toml|json|jsonl|txt"
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def _project(folder: Path = ROOT) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


def _extras() -> set[str]:
    return set(_project()["optional-dependencies"])


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
    paths = [path for folder in [ROOT, *_folders(ROOT)] for path in folder.iterdir()]
    return {str(path.relative_to(ROOT)) for path in paths} | {path.name for path in paths}


def _folders(above: Path) -> Iterator[Path]:
    """Walk down without entering what is not of the repository: an environment has 60,000 files."""
    skipped = {".venv", ".git", "build", "dist", "runs", "__pycache__"}
    for folder in above.iterdir():
        if folder.is_dir() and not folder.is_symlink() and folder.name not in skipped:
            yield folder
            yield from _folders(folder)


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
def test_the_names_of_a_page_are_in_the_repository(page: Path) -> None:
    text = page.read_text()
    if page.name == "coming-from.md":  # the first column has the names of others
        text = re.sub(r"^\| .+? \|", "|", text, flags=re.M)
    assert not list(unknown_names(text))


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
