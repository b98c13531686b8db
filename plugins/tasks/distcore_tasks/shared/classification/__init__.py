"""Rows with a class each: labels, their checks, predictions and their table of scores."""
