"""Promises about devices: two modules name their kinds, and a strategy that
needs one declares it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVICES = {ROOT / "core/distcore/distributed" / name for name in ("arithmetic.py", "devices.py")}
ROOMS_OF_OTHERS = {ROOT / "core/distcore/launchers", ROOT / "core/distcore/rank_environment"}
"""They speak the languages of clusters, which have such words in them."""
CORE = sorted(
    file
    for file in (ROOT / "core").rglob("*.*")
    if file.suffix in (".py", ".txt")
    and file not in DEVICES
    and ROOMS_OF_OTHERS.isdisjoint(file.parents)
)
PACKAGES = sorted(
    file.parent
    for file in ROOT.glob("plugins/*/*/__init__.py")
    if file.parent.name not in ("tests", "distcore_clusters", "distcore_migrate")
)
"""Without those that speak other languages: of clusters, and of other trainers."""
KINDS = re.compile(
    r"(?<![a-z])(cuda|cudnn|cublas|nccl|nvcc|nvidia|nvml|rocm|hip|xpu|xccl|mps|npu|hccl|hpu|mlu|mtia|tpu|xla)(?![a-z])",
    re.I,
)
"""Kinds of accelerator, their makers and their libraries, also as part of a
name such as ``NCCL_DEBUG``.
"""


def named(text: str) -> list[str]:
    """The lines of a source that name a kind of device."""
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if KINDS.search(line)
    ]


def declarations(text: str) -> list[ast.keyword | None]:
    """For each ``Capabilities(…)`` of a source the argument ``devices``, ``None`` where it
    says nothing of them.
    """
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    made = (
        call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Capabilities"
    )
    return [
        next((argument for argument in call.keywords if argument.arg == "devices"), None)
        for call in made
    ]


def undeclared(sources: list[str]) -> list[str]:
    """The lines of a plugin that name a kind of device, if some strategy of it does not declare
    what it runs on.

    The declaration itself may name it in any case.
    """
    all_declared = [declaration for text in sources for declaration in declarations(text)]
    if all_declared and all(all_declared):
        return []
    lines = []
    for text in sources:
        declared = {declaration.lineno for declaration in declarations(text) if declaration}
        lines += [line for line in named(text) if int(line.partition(":")[0]) not in declared]
    return lines


def test_no_other_module_of_the_core_names_a_kind_of_device() -> None:
    lines = {str(file): named(file.read_text()) for file in CORE}
    assert not {file: kinds for file, kinds in lines.items() if kinds}


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_a_plugin_that_names_one_declares_the_devices_of_its_strategies(folder: Path) -> None:
    assert not undeclared([file.read_text() for file in folder.rglob("*.py")])


def test_every_way_to_name_one_is_seen() -> None:
    seen = [
        "torch.cuda.synchronize()",
        'if kind == "xpu":',
        "NCCL_DEBUG",
        "CUDA_VISIBLE_DEVICES",
        "an_npu",
        "XLA",
    ]
    assert len(named("\n".join(seen))) == len(seen)
    assert not named("inputs\ndumps(facts)\noutput\nmembership\nrelation\n")


def test_a_strategy_that_declares_nothing_is_seen() -> None:
    silent, speaks = (
        "Capabilities(spec_version=3)\n",
        'Capabilities(devices=frozenset({"cpu", "cuda"}))\n',
    )
    uses = "torch.cuda.synchronize()\n"
    assert undeclared([silent, uses]) == ["1: torch.cuda.synchronize()"]
    assert undeclared([speaks, silent + uses]) == ["2: torch.cuda.synchronize()"]
    assert not undeclared([speaks, uses])
    assert not undeclared([speaks, silent])
