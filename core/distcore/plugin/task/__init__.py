"""The side of a task: what it is, what it may do, and how the core calls it. Begin with `task`."""
