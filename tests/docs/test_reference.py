"""Every setting, public name and switch is documented, and tables of measurements
show what was measured.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, is_typeddict

import pytest
from pydantic import BaseModel
from strategy_chain import is_offered

import distcore
import distcore.checkpoint
import distcore.cli
import distcore.distributed
import distcore.engine.tracing
import distcore.files
import distcore.hints
import distcore.lab
import distcore.launchers
import distcore.launchers.processes
import distcore.model
import distcore.plugin.batching
import distcore.plugin.strategy
import distcore.rank_environment
import distcore.resolve.padding_free
import distcore.testing
import distcore_data
import distcore_data.formats
import distcore_tasks.rows
from distcore import registry
from distcore.config import RunConfig
from distcore.plugin.options import field_docs, options_of
from distcore.testing import STRATEGIES, StrategyContract

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def load(file: str) -> ModuleType:
    """A module that is no part of a package."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def config_keys(
    model: type[BaseModel] = RunConfig, above: str = ""
) -> Iterator[tuple[str, str | None]]:
    """Every dotted key with its description, those of the trees themselves among them."""
    for name, field in model.model_fields.items():
        yield f"{above}{name}", field.description
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from config_keys(field.annotation, f"{above}{name}.")


def test_every_config_key_says_what_it_is() -> None:
    assert not [key for key, description in config_keys() if not description]


def test_every_config_key_is_on_its_page_with_its_flag() -> None:
    pytest.importorskip("sphinx")  # it comes with `make docs`
    page = load("docs/_ext/generated_reference.py").config_page()
    assert not [key for key, _ in config_keys() if f"`{key}`" not in page]
    assert re.search(
        r"^\| `clip.norm` \| number > 0 or `null` \| `1.0` \| .+ \| `--clip-norm` \|$", page, re.M
    )
    assert re.search(
        r"^\| `precision` \| `fp32`, `bf16`, `fp16`, `auto` \| `fp32` \| .+ \| `--precision` \|$",
        page,
        re.M,
    )


MODULES = [
    distcore,
    distcore_data,
    distcore_data.formats,
    distcore_tasks.rows,
    distcore.checkpoint,
    distcore.cli,
    distcore.distributed,
    distcore.engine.tracing,
    distcore.files,
    distcore.hints,
    distcore.lab,
    distcore.launchers,
    distcore.launchers.processes,
    distcore.model,
    distcore.plugin.batching,
    distcore.plugin.strategy,
    distcore.rank_environment,
    registry,
    distcore.resolve.padding_free,
    distcore.testing,
]
PUBLIC = [(name, getattr(module, name)) for module in MODULES for name in module.__all__]


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (DOCS / "reference/api.md").read_text()
    for name, value in PUBLIC:
        target = (
            re.escape(value.__name__) if isinstance(value, ModuleType) else rf"(?:[\w.]+\.)?{name}"
        )
        assert re.search(rf"^\.\. (?:auto|py:)\w+:: {target}(?:\(\))?$", page, re.M), name


def test_every_public_function_has_a_docstring() -> None:
    assert not [
        name for name, value in PUBLIC if inspect.isroutine(value) and not inspect.getdoc(value)
    ]


def undocumented(value: type) -> set[str]:
    """Names of the public methods and fields of a class that have no docstring."""
    if issubclass(value, BaseModel):
        return set()  # its keys have descriptions
    members = {name: member for name, member in vars(value).items() if not name.startswith("_")}
    names = {
        name for name, member in members.items() if callable(member) and not inspect.getdoc(member)
    }
    names |= {
        name
        for name, member in members.items()
        if isinstance(member, property) and not member.__doc__
    }
    if dataclasses.is_dataclass(value):
        fields = {
            field.name for field in dataclasses.fields(value) if not field.name.startswith("_")
        }
        names |= fields - field_docs(value).keys()
    if is_typeddict(value):
        names |= value.__annotations__.keys() - field_docs(value).keys()
    return names


def test_every_public_class_its_methods_and_its_fields_have_docstrings() -> None:
    classes = {name: value for name, value in PUBLIC if inspect.isclass(value)}
    assert not [name for name, value in classes.items() if not value.__doc__]
    gaps = {name: undocumented(value) for name, value in classes.items()}
    assert not {name: members for name, members in gaps.items() if members}


@pytest.mark.parametrize("module", [value for _, value in PUBLIC if isinstance(value, ModuleType)])
def test_every_function_of_a_public_module_has_a_docstring(module: ModuleType) -> None:
    own = {
        name: it
        for name, it in vars(module).items()
        if getattr(it, "__module__", "") == module.__name__
    }
    assert not [
        name for name, it in own.items() if not name.startswith("_") and not inspect.getdoc(it)
    ]


def test_the_table_of_the_rooms_is_the_core_as_it_is() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| .+ \| `([\w./]+)` \|$", (DOCS / "architecture.md").read_text(), re.M
    )
    package = ROOT / "core/distcore"
    assert {room for room, _ in rows} == {
        file.parent.name for file in package.glob("*/__init__.py")
    }
    assert not [room for room, module in rows if not (package / room / module).is_file()]


def plugins(group: str) -> Iterator[tuple[str, type]]:
    """Name and class of what this repository offers, the backends that are not
    built here left out.
    """
    for name, entry in registry.entries(group).items():
        ours = entry.module.split(".")[0] == "distcore" or any(
            ROOT.glob(f"plugins/*/{entry.module.split('.')[0]}")
        )
        if ours and (group != "strategies" or is_offered(name)):
            yield name, entry.load()


WITH_OPTIONS = ("strategies", "tasks", "optimizers", "extensions")


@pytest.mark.parametrize(
    ("name", "cls"), [plugin for group in WITH_OPTIONS for plugin in plugins(group)]
)
def test_every_strategy_and_extension_says_what_it_and_each_option_is(name: str, cls: type) -> None:
    assert cls.__doc__
    assert not [option.name for option in options_of(cls) if not option.doc]


@pytest.mark.parametrize("group", WITH_OPTIONS)
def test_every_option_is_on_the_page_of_the_options(group: str) -> None:
    pytest.importorskip("sphinx")
    page = load("docs/_ext/generated_reference.py").options_page(group)
    sections = dict(re.findall(r"^### (\S+)\n(.*?)(?=^### |\Z)", page, re.M | re.S))
    for name, cls in plugins(group):
        assert not [
            option.name
            for option in options_of(cls)
            if f"\n| `{option.name}` |" not in sections[name]
        ]
    assert f"```{{plugin-options}} {group}\n" in (DOCS / "reference/options.md").read_text()


@pytest.mark.parametrize(
    ("name", "cls"), [it for it in plugins("strategies") if it[1].__module__[:9] != "distcore."]
)
def test_every_option_of_a_strategy_is_in_the_table_of_its_plugin(name: str, cls: type) -> None:
    package = cls.__module__.split(".")[0]
    readme = next(ROOT.glob(f"plugins/*/{package}")).parent / "README.md"
    named = {
        word
        for row in re.findall(r"^\| (.+?) \|", readme.read_text(), re.M)
        for word in re.findall(r"`(\w+)`", row)
    }
    assert not {option.name for option in options_of(cls)} - named


def test_every_decision_is_linked() -> None:
    listed = re.findall(r"\[.+?\]\((\S+?\.md)\)", (DOCS / "decisions/README.md").read_text())
    assert sorted([*listed, "README.md"]) == sorted(
        path.name for path in DOCS.glob("decisions/*.md")
    )


def test_the_tables_of_the_laws_show_what_was_measured() -> None:
    tables = load("tools/law_tables.py")
    numbers = json.loads(tables.NUMBERS.read_text())
    for page, table in tables.pages(numbers).items():
        assert tables.MARKS.search(page.read_text()), f"{page}: no place for the table"
        assert page.read_text() == tables.with_table(page.read_text(), table), (
            f"{page}: run tools/law_tables.py"
        )
    assert set(numbers["settings"]) == set(tables.SETTINGS)


def test_the_tables_of_a_task_are_its_specification() -> None:
    tables = load("tools/task_tables.py")
    page = tables.PAGE.read_text()
    assert page == tables.with_tables(page), "run tools/task_tables.py"


def test_each_case_was_measured_under_each_setting_and_holds() -> None:
    numbers = json.loads((DOCS / "laws.json").read_text())
    assert numbers["cases"].keys() == STRATEGIES.cases.keys()
    for setting in (setting for settings in numbers["settings"].values() for setting in settings):
        assert setting["errors"].keys() == numbers["cases"].keys()
        errors = {
            case: error for case, error in setting["errors"].items() if not isinstance(error, str)
        }
        assert not [
            case for case, error in errors.items() if error > numbers["cases"][case]["bound"]
        ]


def test_check_contract_and_page_have_the_same_cases() -> None:
    assert [case.name for case in STRATEGIES.subject("single").cases] == [*STRATEGIES.cases]
    tests: list[Any] = [StrategyContract.test_law, StrategyContract.test_own_module]
    marks = [mark for test in tests for mark in test.pytestmark]
    assert [case for mark in marks for case in mark.args[1]] == [*STRATEGIES.cases]
    page = (DOCS / "laws.md").read_text()
    first, *_ = page.partition("<!-- laws -->")
    assert [case for case in STRATEGIES.own_modules if f"`{case}`" not in first] == []


def test_the_sentence_about_any_to_any_is_that_of_all_pairs() -> None:
    benchmark = load("benchmarks/any_to_any.py")
    pairs = json.loads((DOCS / "any-to-any.json").read_text())
    page = (DOCS / "laws.md").read_text()
    assert all(row.keys() == pairs.keys() and row[source] == 0 for source, row in pairs.items())
    worst = max(value for row in pairs.values() for value in row.values())
    assert worst <= benchmark.PUBLISHED
    assert f"the largest distance is {worst:.1e}" in " ".join(page.split())


def test_the_sentence_about_bits_of_any_to_any_is_that_of_all_pairs() -> None:
    pairs = json.loads((DOCS / "any-to-any-bits.json").read_text())
    assert all(row == dict.fromkeys(pairs, 0) for row in pairs.values())
    page = " ".join((DOCS / "laws.md").read_text().split())
    assert f"{len(pairs)} of them, on one and two ranks" in page
    assert f"in all {len(pairs) ** 2} pairs: 0 elements" in page


def test_the_table_of_other_trainers_is_that_of_what_was_measured() -> None:
    benchmark = load("benchmarks/rivals.py")
    numbers = json.loads((DOCS / "rivals.json").read_text())
    (between,) = re.findall(
        r"<!-- rivals -->\n(.*?)<!-- /rivals -->", (DOCS / "laws.md").read_text(), re.S
    )
    assert between == benchmark.table(numbers), "run benchmarks/rivals.py --page"
    assert [row["title"] for row in numbers["rivals"]] == [
        rival.title for rival in benchmark.RIVALS.values()
    ]
    assert all(row["errors"].keys() == benchmark.CASES.keys() for row in numbers["rivals"])


def test_the_sentence_about_random_faults_is_that_of_what_was_measured() -> None:
    benchmark = load("benchmarks/chaos.py")
    rows = [benchmark.Row(**row) for row in json.loads((DOCS / "chaos.json").read_text())]
    assert (
        f"<!-- chaos -->\n{benchmark.sentence(rows)}<!-- /chaos -->"
        in (DOCS / "laws.md").read_text()
    )
