"""Classification of rows: labels and their checks, predictions, and the table of scores."""
