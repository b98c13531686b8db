"""One thread per process in every test: ranks share the cores, and sums of one thread are the same everywhere."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for every process that a test starts

pytest_plugins = ["rank_watch"]
