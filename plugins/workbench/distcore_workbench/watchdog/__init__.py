"""The extension ``watchdog``: which rank is stuck, and what it does while the others wait."""

from distcore_workbench.watchdog.watchdog import Watchdog

__all__ = ["Watchdog"]
