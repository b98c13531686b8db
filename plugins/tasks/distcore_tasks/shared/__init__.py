"""What several tasks use, one module per subject."""
