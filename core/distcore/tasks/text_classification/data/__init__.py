"""Labelled texts: read, checked, split, tokenised and cached by content."""
