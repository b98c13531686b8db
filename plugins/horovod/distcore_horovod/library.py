"""The only module that imports Horovod, so that a failed import always names the
command that builds it.
"""

from __future__ import annotations

try:
    import horovod.torch as hvd
except ImportError as error:
    raise ImportError(
        f"Horovod cannot be imported ({' '.join(str(error).split())[:200]}); "
        "build it for the installed torch with: distcore-horovod build"
    ) from error

__all__ = ["hvd"]
