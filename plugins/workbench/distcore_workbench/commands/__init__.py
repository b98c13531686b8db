"""The flags of this package's commands; what they do is imported when they run."""
