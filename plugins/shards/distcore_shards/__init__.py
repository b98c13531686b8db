"""Formats of rows: the folders of shards that mosaicml-streaming (MDS) and litdata write.

Entry points of ``distcore.readers`` name them, as those of any other distribution do. A run imports
them when ``--data`` names a folder.
"""

__version__ = "0.1.0"
