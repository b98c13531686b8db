"""A public package shows its names to dir() and to completion, and imports nothing for that."""

from __future__ import annotations

import subprocess
import sys
from rlcompleter import Completer

import pytest

import distcore

PACKAGES = ["distcore", "distcore.lab", "distcore.model", "distcore.plugin.strategy"]


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_has_every_public_name_and_what_is_imported_besides(package: str) -> None:
    code = (
        f"import sys, {package} as package\n"
        "shown = dir(package)\n"
        "print(sorted(set(package.__all__) - set(shown)), '__name__' in shown)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\nFalse\n"


def test_completion_shows_them() -> None:
    completer = Completer({"distcore": distcore})
    shown = [completer.complete("distcore.load_c", number) for number in range(2)]
    assert shown == ["distcore.load_config(", None]
