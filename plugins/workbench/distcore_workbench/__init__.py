"""Before and after a run of distcore: `plan`, `tune`, `compare` and `report`."""

__version__ = "0.1.0"
