"""torch's DistributedDataParallel and DataParallel as distcore strategies."""

__version__ = "0.1.0"
