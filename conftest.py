"""Set-up of every test: one thread per process, since ranks share the cores, and a screen
of no known width.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Generator
from importlib.metadata import distributions
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):
    # tells all later processes how wide the terminal is, so it goes before what follows
    import readline  # noqa: F401


def _strangers() -> set[str]:
    """Distributions with plugins that are none of this project, such as the tutorial's: our tests
    must not see them.

    One that a user writes inside this checkout has tests of its own, which must.
    """
    asked = {
        part
        for word in (".", *sys.argv[1:])
        for part in Path(word.partition("::")[0]).absolute().parts
    }
    ours = {f"distcore-{folder.name}" for folder in (Path(__file__).parent / "plugins").iterdir()}
    with_plugins = (
        one.name
        for one in distributions()
        if "[distcore." in (one.read_text("entry_points.txt") or "")
    )
    return set(with_plugins) - ours - asked - {"distcore", "distcore-core"}


os.environ["DISTCORE_BLOCK_PLUGINS"] = ",".join(_strangers())
# before torch is imported, and for every process that a test starts
os.environ["OMP_NUM_THREADS"] = "1"
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)  # also where it was set behind the back of os.environ

pytest_plugins = ["rank_watch", "warm_programs", "shared_fixtures"]

LONGEST = (
    "plugins/deepspeed/tests/test_deepspeed_laws.py",
    "tests/house/test_docs.py",
    "plugins/accelerate/tests/test_accelerate_contract.py",
    "plugins/mesh/tests/test_mesh_contract.py",
    "plugins/horovod/tests/test_horovod_laws.py",
    "tests/papers/test_install_lines.py",
    "plugins/ddp/tests/test_ddp_contract.py",
    "tests/testing/test_mutants.py",
    "plugins/fsdp/tests/test_fsdp_contract.py",
    "tests/papers/test_distributions.py",
)
"""The files that take longest, the longest first."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the collected tests, a million objects that stay: it does not
    walk over them while they are made, nor afterward.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, and skip tests that need what is not installed."""
    _begin_with_the_longest(items)
    _skip_where_not_installed(items)


def _begin_with_the_longest(items: list[pytest.Item]) -> None:
    """Else one worker is alone with such a file at the end, while the others are idle."""
    places = {file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONGEST)))


def _skip_where_not_installed(items: list[pytest.Item]) -> None:
    """Skip tests of the core that need another distribution beside it, where
    that is not installed.
    """
    installed = {distribution.name for distribution in distributions()}
    for item in items:
        for mark in item.iter_markers("needs"):
            if missing := [name for name in mark.args if name not in installed]:
                item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))
