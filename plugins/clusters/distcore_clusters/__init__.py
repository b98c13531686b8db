"""Launch ranks of distcore on other machines: over ssh, and by SLURM, MPI and Kubernetes."""

__version__ = "0.1.0"
