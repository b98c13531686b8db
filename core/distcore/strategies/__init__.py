"""The strategy that comes with the core: `single`, which the laws compare every other one with."""
