"""Make the pictures of the README: python tools/pictures.py [terminal] [compare]

Each comes from a real command, run in an empty folder on the data that ships with distcore: the
last screen of a training run in a terminal, and the plots of the page that `distcore compare`
writes, in Chromium. Speeds are those of this machine.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from browser import Browser
from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parents[1] / "docs/pictures"
COLUMNS = 100
"""Characters per line of the terminal."""
TRAIN = (
    "distcore train --strategy ddp --nproc 2 --model bert-tiny --max-seq-len 64 --lr 1e-3 --epochs"
    " 3 --out runs/first"
)
COMPARE = (
    "distcore compare --strategies single,ddp,fsdp --nproc 2 --model bert-tiny --max-seq-len 64"
    " --dropout 0 --max-steps 30 --rounds 2 --no-communication --out compare"
)
OUTPUT = re.compile(
    r"\x1b\[(?P<up>\d*)A|(?P<erase>\x1b\[2K)|\x1b\[\?\d+[hl]|(?P<down>\n)|(?P<start>\r)|"
    r"(?P<text>(?:\x1b\[[\d;]*m|[^\x1b\r\n])+)"
)
"""Output of rich to a terminal: cursor up, erase the line, show or hide the cursor, and
text with its colors.
"""
WIDTH = 1040
"""Pixels of the page whose plots are shown."""


def terminal(folder: Path) -> str:
    """Return a picture of the terminal at the end of a training run."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), TRAIN))
    for line in last_screen(output_of(TRAIN, folder)):
        console.print(Text.from_ansi(line))
    picture = console.export_svg(title="distcore train", unique_id="terminal")
    return re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.S)  # fonts from the network


def output_of(command: str, folder: Path) -> str:
    """Run a command of distcore in ``folder`` on a terminal of its own; return all
    that it sent there.
    """
    ours, theirs = pty.openpty()
    settings = {
        "COLUMNS": str(COLUMNS),
        "TERM": "xterm-256color",
        "DISTCORE_CACHE": str(folder / "cache"),
    }
    program = [sys.executable, "-m", *shlex.split(command)]
    with subprocess.Popen(
        program, cwd=folder, env=os.environ | settings, stdout=theirs, stderr=theirs
    ) as child:
        os.close(theirs)
        sent = b""
        while chunk := _read(ours):
            sent += chunk
    os.close(ours)
    if child.returncode:
        raise SystemExit(f"{command}\n{sent.decode()}")
    return sent.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how Linux says that nobody has the other end open
        return b""


def last_screen(output: str) -> list[str]:
    """Return the lines that stand on a terminal after ``output``, with their colors."""
    lines, row, fresh = [""], 0, False
    for part in OUTPUT.finditer(output):
        if part["up"] is not None:
            row -= int(part["up"] or 1)
        elif part["erase"]:
            lines[row] = ""
        elif part["start"]:
            fresh = True
        elif part["down"]:
            row, fresh = row + 1, False
            lines += [""] * (row + 1 - len(lines))
        elif part["text"]:
            lines[row], fresh = part["text"] if fresh else lines[row] + part["text"], False
    while lines and not Text.from_ansi(lines[-1]).plain.strip():
        lines.pop()
    return lines


def compare(folder: Path) -> bytes:
    """Return a picture of the plots on the page of a comparison."""
    done = subprocess.run([sys.executable, "-m", *shlex.split(COMPARE)], cwd=folder, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    with Browser(folder / "browser") as window:
        window.open(folder / "compare/compare.html", WIDTH)
        return window.picture(".figures")


def main() -> None:
    """Make the pictures that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pictures: dict[str, Callable[[Path], str | bytes]] = {"terminal": terminal, "compare": compare}
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of: {', '.join(pictures)} (default: all)"
    )
    PICTURES.mkdir(exist_ok=True)
    for name in parser.parse_args().names or pictures:
        with tempfile.TemporaryDirectory(prefix="distcore-") as folder:
            picture = pictures[name](Path(folder))
            for private in (folder, socket.gethostname(), str(Path.home())):
                if isinstance(picture, str) and private in picture:
                    raise SystemExit(f"{name}: the picture says {private}")
        if isinstance(picture, str):
            (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")
        else:
            (PICTURES / f"{name}.png").write_bytes(picture)


if __name__ == "__main__":
    main()
