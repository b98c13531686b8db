"""The extensions that come with the core: they listen to the events of a run,
or wrap its operations.

Begin with `metrics`.
"""
