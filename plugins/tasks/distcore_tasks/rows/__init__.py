"""The way of a row, from a source to a batch, stored or streamed: the same for every task.

A task says in a ``RowPipeline`` what its rows are. ``prepare_rows`` does the rest: it reads,
chooses, splits, encodes and caches. What it returns are ``RowDataset``: rows of a ``Table``, which
are mapped from the cache (``CachedTable``), or encoded when their step comes (``LazyTable``).
"""
