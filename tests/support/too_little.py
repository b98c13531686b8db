"""A job that its memory is too small for: a model with one block of 2.3 GB in a process that
may have 2 GiB.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

LIMIT = 2 * 2**30
SAID = "2.00 GiB are available; next: a strategy that shards parameters"
"""Part of the error line about memory."""


def run(folder: Path, words: str) -> tuple[int, list[str]]:
    """Run Python with ``words`` in ``folder``, with a task ``own.py:Own``; return its
    status and stderr.s lines.
    """
    (folder / "own.py").write_text(
        "import torch\n"
        "from distcore.testing.problem import Problem\n"
        "class Own(Problem):\n"
        "    def build_model(self, config, data):\n"
        "        model = super().build_model(config, data)\n"
        "        model.more = torch.nn.Linear(24000, 24000)\n"
        "        return model\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))

    command = [sys.executable, *words.split()]
    done = subprocess.run(
        command, preexec_fn=limit, cwd=folder, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr.splitlines()
