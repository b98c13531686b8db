"""What distcore can train: implementations of ``distcore.contract.Task``."""
