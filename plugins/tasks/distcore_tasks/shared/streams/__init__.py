"""Rows that are read and encoded when their step comes: of a source nothing but
its index is stored.
"""
