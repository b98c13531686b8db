"""Start a rank that dies with its parent: ``python -m distcore_ray.child PARENT WORD
…`` runs the words.

A rank that outlived its actor would write to the run folder of the ranks that took its place.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal at the death of the parent. It stays set across ``exec``."""


def main(argv: Sequence[str]) -> None:
    """Become the program ``argv[1:]``; ``argv[0]`` is the process id of the parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(argv[0]):  # the parent died before the call of prctl
            raise SystemExit(1)
    os.execv(argv[1], list(argv[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
