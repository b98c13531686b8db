"""Launch ranks of distcore on other machines: over ssh, and by SLURM, MPI and Kubernetes.

A launcher of another package may import the names in ``__all__``.
"""

from distcore_clusters.planning import check_restarts, need_nproc, variables_elsewhere

__all__ = ["check_restarts", "need_nproc", "variables_elsewhere"]
__version__ = "0.1.0"
