"""What every test has: one thread per process, since ranks share the cores, and a screen of no known width."""

import contextlib
import os

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  # tells all later processes how wide the terminal is, so it goes before what follows

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for every process that a test starts
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)  # also where it was set behind the back of os.environ

pytest_plugins = ["rank_watch", "shared_fixtures"]
