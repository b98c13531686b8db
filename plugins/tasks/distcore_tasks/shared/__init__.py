"""Code that several tasks share, one module per subject."""
