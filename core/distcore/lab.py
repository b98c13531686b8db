"""What a tool needs that looks at a job before, while or after it runs, as a planner does.

Any distribution may import the names in ``__all__``. Names are imported when they are first used.
No module of the core imports this one.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
