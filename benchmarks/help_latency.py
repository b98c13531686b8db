"""CPU seconds of ``distcore --help`` and ``distcore train --help``, median of N runs.

Bound: 0.25 s for either.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

BOUND = 0.25


def cpu_seconds(command: list[str]) -> float:
    """Return the user and system time of ``command`` in seconds."""
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def main() -> int:
    """Print the figures; return 0 if the bound holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=15)
    repeat = parser.parse_args().repeat
    worst = 0.0
    for arguments in ([], ["train"]):
        command = [sys.executable, "-m", "distcore", *arguments, "--help"]
        seconds = [cpu_seconds(command) for _ in range(repeat)]
        median = statistics.median(seconds)
        worst = max(worst, median)
        name = " ".join(["distcore", *arguments, "--help"])
        print(
            f"{name:24} {median:.3f} s of CPU (median of {repeat}; {min(seconds):.3f} to"
            f" {max(seconds):.3f})"
        )
    bare = statistics.median(cpu_seconds([sys.executable, "-c", "pass"]) for _ in range(repeat))
    print(f"{'python -c pass':24} {bare:.3f} s of CPU")
    print(f"bound {BOUND} s: {'held' if worst <= BOUND else 'broken'}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
