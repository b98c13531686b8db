"""What the sources themselves promise: the core names no backend, plugins import only public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import distcore

ROOT = Path(__file__).parents[1]
CORE = sorted((ROOT / "core").rglob("*.py"))
PLUGINS = sorted(file for file in ROOT.glob("plugins/*/*/**/*.py") if "tests" not in file.parts)
BACKENDS = re.compile(r"\b(ddp|dp|fsdp2?|fully_shard|deepspeed|horovod|accelerate|DistributedDataParallel)\b", re.I)


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT / "core")))
def test_the_core_names_no_backend(file: Path) -> None:
    for number, line in enumerate(file.read_text().splitlines(), 1):
        assert not BACKENDS.search(line), f"{file}:{number}: {line.strip()}"


@pytest.mark.parametrize("file", PLUGINS, ids=lambda file: str(file.relative_to(ROOT / "plugins")))
def test_a_plugin_imports_only_public_names(file: Path) -> None:
    package = file.relative_to(ROOT / "plugins").parts[1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0].startswith("distcore"):
            if node.module == "distcore":
                private = {alias.name for alias in node.names} - set(distcore.__all__)
                assert not private, f"{file}:{node.lineno}: not public: {private}"
            else:
                assert node.module.split(".")[0] == package, f"{file}:{node.lineno}: {node.module}"


def test_public_names_exist() -> None:
    for name in distcore.__all__:
        assert getattr(distcore, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'distcore' has no attribute 'nothing'"):
        distcore.nothing  # noqa: B018
