"""No module of ours warns in a run, or has a library warn of it.

The tests themselves run with such warnings as errors (``filterwarnings`` in pyproject.toml); this
is a whole run in processes of their own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from strategy_chain import is_offered

SCRIPT = """
import sys, warnings

# Of all modules whose names begin so, the plugins' too.
warnings.filterwarnings("error", module="distcore")
from distcore.cli.main import main

sys.exit(main(sys.argv[1:]))
"""
JOB = "--data rows.json --model bert-tiny --max-seq-len 16 --max-steps 2 --device cpu --nproc 2"
STRATEGIES = ("ddp", "fsdp", "mesh", "deepspeed", "accelerate", "horovod")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if is_offered(name)])
def test_a_run_in_which_our_warnings_are_errors_is_clean(work_folder: Path, strategy: str) -> None:
    for command in (
        f"train {JOB} --strategy {strategy} --out run",
        f"eval run --strategy {strategy} --nproc 2",
    ):
        words = [sys.executable, "-c", SCRIPT, *command.split()]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
        assert ran.returncode == 0, ran.stderr


def test_a_warning_of_ours_is_an_error_in_every_test() -> None:
    import warnings

    with pytest.raises(DeprecationWarning, match="an old name"):
        warnings.warn_explicit(
            "an old name", DeprecationWarning, "module.py", 1, module="distcore_ddp.strategy"
        )
