"""Labelled images: found, decoded once to see that they can be, and read again by the batch."""
