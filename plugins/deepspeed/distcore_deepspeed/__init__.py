"""DeepSpeed as a distcore strategy."""

__version__ = "0.1.0"

# Before any other module of this package imports DeepSpeed, which looks at the machine when it is imported.
from distcore_deepspeed import backend as backend
