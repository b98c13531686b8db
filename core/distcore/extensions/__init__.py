"""The extensions that ship with distcore: each listens to the events of a run, or wraps its operations."""
