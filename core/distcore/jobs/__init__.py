"""From a config to ranks that train, evaluate or export. No module here knows the command line. Begin with `train`.

A public room for tools that look at a job before or after it runs, such as a planner: what stands in ``__all__`` may be
imported by any distribution. Names are imported when they are first used.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__ = names_of_stub(__name__, __file__)
