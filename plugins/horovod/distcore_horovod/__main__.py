"""The command ``distcore-horovod``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """usage: distcore-horovod build [--if-missing] [--wheel-only] | check

  build   build Horovod against the installed torch (minutes, then cached), install it, and check it
  check   have two processes all-reduce with the installed Horovod"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "build":
        from distcore_horovod import build

        return build.main(rest)
    if command == "check" and not rest:
        from distcore_horovod import check

        return check.main()
    helping = command in ("-h", "--help")
    print(USAGE if helping else f"error: no command {command!r}\n{USAGE}", file=sys.stdout if helping else sys.stderr)
    return 0 if helping else 2


if __name__ == "__main__":
    raise SystemExit(main())
