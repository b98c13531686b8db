"""What distcore can train: implementations of ``distcore.plugin.task.Task``."""
