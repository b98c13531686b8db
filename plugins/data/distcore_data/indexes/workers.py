"""Indexes of several files at a time, made by processes that are given one file after the other.

They are programs, not forks: a run that has threads starts them, too. The cache is what they share,
so what a process leaves undone, because it was killed or met a bad file, the caller does, and says
what is wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from subprocess import PIPE, Popen

from distcore_data.fetching import present
from distcore_data.indexes.entries import FileIndex, file_index, known_index

LEAST = 2**26
"""Bytes from which on it pays to start processes."""


def index_files(files: Sequence[Path]) -> tuple[list[FileIndex], int]:
    """Return the index of each file, and how many were made now. Raises DataError."""
    known = {file: known_index(file) for file in files}
    missing = [file for file in files if known[file] is None]
    _in_processes([file for file in missing if file.is_file()])
    made = {file: file_index(file) for file in present(missing)}
    return [known[file] or made[file] for file in files], len(missing)


def _in_processes(files: Sequence[Path]) -> None:
    workers = min(len(files), len(os.sched_getaffinity(0)))
    if workers < 2 or sum(file.stat().st_size for file in files) < LEAST:
        return
    queue = SimpleQueue[Path]()
    for file in files:
        queue.put(file)
    with ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(_serve, queue) for _ in range(workers)]:
            done.result()


def _serve(queue: SimpleQueue[Path]) -> None:
    """Start a process and give it one file after the other; it ends with its stdin, if this
    process is killed, too.
    """
    command = [sys.executable, "-m", "distcore_data.indexes.worker"]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process, suppress(Empty, OSError):
        assert process.stdin
        assert process.stdout
        while True:
            process.stdin.write(json.dumps(str(queue.get_nowait().absolute())) + "\n")
            process.stdin.flush()
            if not process.stdout.readline():
                return
