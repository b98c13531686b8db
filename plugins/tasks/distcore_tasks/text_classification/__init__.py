"""Text classification: texts in files to a Hugging Face classifier and its report."""
