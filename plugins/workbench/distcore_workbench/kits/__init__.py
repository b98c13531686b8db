"""Laws of every kind of plugin but strategies and tasks, for ``distcore check`` and pytest."""
