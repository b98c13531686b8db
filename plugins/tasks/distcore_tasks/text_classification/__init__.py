"""Text classification with a transformers model."""
