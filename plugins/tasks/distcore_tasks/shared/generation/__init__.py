"""Text that a model writes: what its folder says of it, which rows are written together,
where a text ends.
"""
