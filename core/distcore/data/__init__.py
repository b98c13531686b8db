"""Prepared data in a cache on disk, and micro-batches on the device; nothing here is about text."""
