"""The extensions that ship with distcore. An extension listens to the events of a run, or wraps its operations."""
