"""What distcore can train: implementations of ``distcore.tasks.contract.Task``."""
