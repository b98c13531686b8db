"""Hugging Face Accelerate as a distcore strategy."""

__version__ = "0.1.0"
