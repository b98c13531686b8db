"""Hugging Face Accelerate as a distcore strategy."""
