"""The flags of this package's commands; their implementations are imported when they run."""
