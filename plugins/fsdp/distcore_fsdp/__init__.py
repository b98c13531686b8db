"""Fully sharded training for distcore; the strategy is ``distcore_fsdp.fsdp.FSDPStrategy``."""
