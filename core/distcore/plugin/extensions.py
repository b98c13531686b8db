"""Extensions: plugins that listen to the events of a run, or wrap its operations, and never change its mathematics.

``config.extensions`` maps a name to true, false or options. A name is an entry point of ``distcore.extensions``,
or ``path/to/file.py:Class`` for a class that is not packaged.
"""

from __future__ import annotations

from distcore import registry
from distcore.config import RunConfig
from distcore.files import absolute
from distcore.plugin.options import build


def load_extensions(config: RunConfig) -> dict[str, object]:
    """Import and build the extensions that are switched on, in the order of the config; return them by name.

    Raises StrategyError, one line, for an unknown name, a file that does not import, or a wrong option.
    """
    # A file may be named twice: by its absolute path in a run's config.yaml, and as the user names it now.
    given = {absolute(name): (name, switch) for name, switch in config.extensions.items()}
    return {
        name: build("extension", name, registry.load("extensions", name), {} if switch is True else switch)
        for name, switch in given.values()
        if switch is not False
    }
