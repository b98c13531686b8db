"""The extension ``watchdog``: which rank stands still, and what it does instead of what
the others wait for.
"""

from distcore_workbench.watchdog.watchdog import Watchdog

__all__ = ["Watchdog"]
