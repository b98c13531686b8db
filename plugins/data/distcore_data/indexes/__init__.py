"""Indexes, by which rows of files are found by number: places of some rows, and what a file was
when it was read.
"""
