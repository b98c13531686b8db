"""Plugins that are broken on purpose, for the tests of kits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def broken_in(file: Path) -> dict[str, str]:
    """By the name of each class in ``file`` that says so: the case which must notice that it is broken."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return {name: cls.case for name, cls in vars(module).items() if getattr(cls, "case", "")}
