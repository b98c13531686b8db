"""Launch ranks of distcore on a Ray cluster: ``distcore train --launcher ray[:HOST:PORT]``."""

__version__ = "0.1.0"
