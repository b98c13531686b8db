"""Checkpoints of other trainers, with the optimizer's state: read for ``distcore train --resume``.

Unlike the rest of the package, these files import torch.
"""
