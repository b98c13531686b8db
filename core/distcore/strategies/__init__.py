"""The strategy that comes with the core, which the laws compare every other one with. Begin with `single`."""
