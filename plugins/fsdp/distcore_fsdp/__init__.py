"""Fully sharded training for distcore; the strategy is ``distcore_fsdp.fsdp.FSDPStrategy``."""

__version__ = "0.1.0"
