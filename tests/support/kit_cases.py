"""Plugins that are broken on purpose, for the tests of suites."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from work_folder import install


def broken_in(file: Path) -> dict[str, str]:
    """By the name of each class in ``file`` that says so: the case which must notice
    that it is broken.
    """
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return {name: cls.case for name, cls in vars(module).items() if getattr(cls, "case", "")}


def use_module(
    source: str, group: str, named: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Install ``mine`` of an entry-point group: a module of this source, or what is ``named``
    in it, as ``:export``.
    """
    module = f"mine_{abs(hash(source))}"  # another one for each source: modules are imported once
    install(folder, "distcore-mine", f"[distcore.{group}]\nmine = {module}{named}\n")
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
