"""Labelled texts: read, checked, split and tokenised, and the tokens cached by content."""
