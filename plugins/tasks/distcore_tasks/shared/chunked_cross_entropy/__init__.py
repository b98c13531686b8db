"""Cross entropy over a large vocabulary, in chunks of rows, so that all logits
are never in memory.
"""
