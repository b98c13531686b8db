"""The command line: it parses arguments, starts a job and prints. No module
here imports torch directly.

Begin with `main`. A public room for commands: any distribution may import the names in ``__all__``.
Names are imported when they are first used, so that ``--help`` stays fast.
"""

from distcore.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
