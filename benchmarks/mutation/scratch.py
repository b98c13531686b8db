"""A copy of the repository with an environment of its own, in which one file at
a time is changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mutation.changes import Mutant

ROOT = Path(__file__).parents[2]
AGES = 10**9
"""Modification time of the first mutant; each has another one, because Python knows stale
bytecode by it alone.
"""


class Scratch:
    """A copy of the repository, and a process that runs commands in it."""

    def __init__(self, folder: Path, warm: Sequence[str] = ()) -> None:
        """Copy what git tracks or does not ignore, and start the process, which
        imports the modules ``warm``.
        """
        self.folder = folder / "repository"
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\0")  # fmt: skip
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_bytes((ROOT / name).read_bytes())
        self.log = folder / "log"
        self._ages = AGES
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._server = subprocess.Popen(
            [
                str(self._environment(folder / "env")),
                str(Path(__file__).with_name("server.py")),
                *warm,
            ],
            cwd=self.folder,
            env=self._variables(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _environment(self, folder: Path) -> Path:
        """Return the Python of an environment that has the packages of this one, and
        ours from the copy.
        """
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
        ours = [
            path.parent
            for pattern in ("core", "plugins/*")
            for path in self.folder.glob(f"{pattern}/pyproject.toml")
        ]
        (packages / "a_copy.pth").write_text("\n".join(map(str, ours)) + "\n")
        others = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (packages / "b_others.pth").write_text(others)
        return folder / "bin/python"

    def _variables(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            # The last ones are of a test that makes this copy.
            if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith("DISTCORE_TEST_")
        }
        return kept | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._temporary),
            "TOKENIZERS_PARALLELISM": "false",
        }

    def run(
        self,
        program: str,
        arguments: Sequence[str],
        limit: float,
        stop_at: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> tuple[int | None, bool]:
        """Return the exit code, ``None`` after ``limit`` seconds, and whether ``stop_at`` ended
        it; see the server.
        """
        order = {
            "program": program,
            "arguments": list(arguments),
            "log": str(self.log),
            "limit": limit,
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(
            json.dumps({**order, "stop_at": stop_at, "environment": dict(environment or {})}) + "\n"
        )
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer["code"], answer["words"]

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Change the copy's file, and restore it at the end."""
        original = (self.folder / mutant.file).read_text(encoding="utf-8")
        try:
            self._write(mutant.file, mutant.applied_to(original))
            yield
        finally:
            self._write(mutant.file, original)

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        self._ages += 1
        os.utime(path, (self._ages, self._ages))

    def close(self) -> None:
        """End the process."""
        if self._server.stdin:
            self._server.stdin.close()
        self._server.wait()


@contextmanager
def scratch(warm: Sequence[str] = ()) -> Iterator[Scratch]:
    """Make a ``Scratch`` that lasts as long as the block."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        made = Scratch(Path(folder), warm)
        try:
            yield made
        finally:
            made.close()
