"""Checkpoints of other trainers, with the optimizer's state: read, and written as distcore's own.

Unlike the rest of the package, these files import torch.
"""
