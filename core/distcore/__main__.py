"""``python -m distcore`` is ``distcore``."""

from distcore.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
