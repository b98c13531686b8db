"""From a config to ranks that train, evaluate or export. No module here knows the command
line. Begin with `train`.

A public room for tools that inspect a job before or after it runs, such as a planner: any
distribution may import the names in ``__all__``. Names are imported when they are first used.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__ = names_of_stub(__name__, __file__)
