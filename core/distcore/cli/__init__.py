"""The command line: it parses arguments, starts a job and prints. No module here imports torch directly.

Begin with `main`. A public room for commands: what stands in ``__all__`` may be imported by any distribution. Names are
imported when they are first used, so that ``--help`` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distcore.cli.commands.train import add_job_flags as add_job_flags
    from distcore.cli.commands.train import changes_of as changes_of
    from distcore.cli.flags import FLAGS as FLAGS
    from distcore.config.loading import JobRequest as JobRequest
    from distcore.config.loading import canonical as canonical
    from distcore.config.values import parse_settings as parse_settings
    from distcore.config.values import parse_values as parse_values

_HOME = {
    "FLAGS": "cli.flags",
    "JobRequest": "config.loading",
    "add_job_flags": "cli.commands.train",
    "canonical": "config.loading",
    "changes_of": "cli.commands.train",
    "parse_settings": "config.values",
    "parse_values": "config.values",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"distcore.{_HOME[name]}")
    return getattr(module, name, module)
