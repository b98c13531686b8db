"""Strategies side by side: one job under each, its speed, its memory, and how far apart the parameters end."""
