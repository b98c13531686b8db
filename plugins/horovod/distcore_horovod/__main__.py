"""The command ``distcore-horovod``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """usage: distcore-horovod build [--if-missing] [--wheel-only] | check

  build   build Horovod for the installed torch (some minutes, then cached), install and check it
  check   start two processes that all-reduce with the installed Horovod"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0 done, 2 wrong usage or failed."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command == "build":
        from distcore_horovod import build

        return build.main(rest)
    if command == "check" and not rest:
        from distcore_horovod import check

        return check.main()
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    print(f"error: no command {command!r}\n{USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
