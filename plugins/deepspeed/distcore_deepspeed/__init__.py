"""DeepSpeed as a distcore strategy."""
